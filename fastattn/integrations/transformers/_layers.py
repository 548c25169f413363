"""What transformers sees of a compressed cache: layers that answer its questions, and the way to the attention call."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from fastattn.integrations.transformers import _versions
from fastattn.integrations.transformers._attention import COMPRESSED
from fastattn.validation import checks_values

if TYPE_CHECKING:
    from fastattn.modules.kv_cache import CompressedKVCache


class CompressedLayer(CacheLayerMixin):
    """A full-attention layer whose tokens are in ``kv``, shared by all such layers (None while a model is examined)."""

    is_sliding = False

    def __init__(self, kv: CompressedKVCache | None) -> None:
        super().__init__()
        self.kv = kv
        self.is_initialized = True
        # `generate` compiles decoding over layers with the first mark and, up to some release, refuses assisted
        # decoding over them; it asks for the second before assisted decoding. A cache serves one or the other.
        self.is_compileable = kv is None or kv.max_step == 1
        self.is_croppable = not self.is_compileable

    def lazy_initialization(self, *args: Any) -> None:
        """Nothing: buffers are allocated when the cache is constructed, so that their addresses never change."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Nothing: the attention function stores the tokens, since it sees the query too."""
        return key_states, value_states

    def get_seq_length(self) -> Any:
        """Columns fed so far, padding included."""
        if self.kv is None:
            return 0
        columns = self.kv.columns
        if checks_values(columns):
            return int(columns)
        return columns.clone()  # the buffer itself would change under the caller's hands

    def get_mask_sizes(self, query_length: Any) -> tuple[Any, int]:
        """The mark that tells the mask function for whom it works, in place of an offset."""
        return _versions.query_length(query_length), COMPRESSED

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class Origin:
    """The decoder that a cache was made for, without keeping it alive. A pickled cache forgets it."""

    def __init__(self, decoder: Any = None) -> None:
        self._decoder = None if decoder is None else weakref.ref(decoder)

    def decoder(self) -> Any:
        """The decoder, None where it is gone."""
        return None if self._decoder is None else self._decoder()

    def __deepcopy__(self, memo: dict[int, Any]) -> Origin:
        return self

    def __reduce__(self) -> Any:
        return Origin, ()


class ForwardedCache(Cache):
    """A cache that reaches the attention call by itself, as a keyword argument of the model's forward.

    Attributes:
        signature: what a model must look like to use it.
    """

    def __init__(self, layers: list[Any], signature: str) -> None:
        super().__init__(layers=layers)
        self.signature = signature
        self.entered = False  # between a switched model's forward and its last compressed layer

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layer: Any = self.layers[layer_idx]
        if not isinstance(layer, CompressedLayer):
            return layer.update(key_states, value_states, *args, **kwargs)
        if not self.entered:
            raise ValueError(
                "this cache was made for another model: a model takes compressed caches from compressed_cache(model, "
                f"...) only (made for: {self.signature})"
            )
        return key_states, value_states

    def size_for(self, rows: int) -> None:
        """Make sure that the cache serves a call of ``rows`` rows."""

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        arguments: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Serve one attention call; ``arguments`` are its keyword arguments, ``dropout`` among them."""
        raise NotImplementedError

    def attend_low_rank(
        self, module: Any, hidden_states: Tensor, position_ids: Tensor | None, attention_mask: Tensor | None
    ) -> Tensor:
        """Serve a layer of low-rank attention, which stores latents and goes through no attention function."""
        raise NotImplementedError
