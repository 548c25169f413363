"""A key/value cache of fixed size whose tokens a policy chooses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.modules import _checks
from fastattn.modules._call import CacheLayer, Call, forget_beyond_lengths
from fastattn.modules._window import forget_from_
from fastattn.modules.policies import Policy, resolve_policy
from fastattn.modules.rotary import Rotary
from fastattn.validation import FLOATS, check_count


class CompressedKVCache(nn.Module):
    """Keys and values of every layer, kept to ``budget`` tokens per row and head by a policy.

    A model calls :meth:`attend` once per layer, in layer order, in place of its attention: the new tokens attend to the
    cache and to each other, are appended, and the layer is compressed where that is due. A call with at most
    ``max_step`` tokens compresses the rows and heads that have ``budget + interval`` of them; a call with more (a
    prompt, a chunk, a turn) ends by compressing every row and head above ``budget``. Within the budget nothing is
    evicted and the result is a full cache's.

    State, all of it buffers: ``keys``, ``values``, ``positions`` and ``lengths`` per layer, of
    ``C = budget + interval + max_step - 1`` slots; ``columns`` (tokens fed, padding included) and ``tokens_seen``
    (real tokens per row) for all. Counters are up to date once the last layer of a call has run.

    Args:
        policy: a :class:`Policy` or the name of one: ``"expected_attention"``, ``"knorm"``, ``"streaming_llm"``,
            ``"key_diff"``.
        budget: tokens kept per row and head.
        num_layers: layers that attend through this cache.
        num_kv_heads: key/value heads per layer.
        head_dim: dims of a key.
        v_head_dim: dims of a value; ``head_dim`` by default.
        latent_rank: the cache holds latents ``[latent | rope key]`` of ``head_dim`` columns, whose first
            ``latent_rank`` are the value, stored once. Needs ``num_kv_heads=1``.
        num_heads: query heads, for policies with a query window; otherwise that is allocated on the first eager call.
        batch_size: rows.
        interval: decode steps between two compressions.
        max_step: most tokens of a call that counts as a decode step.
        rotary: the model's rotation; policies that look ahead need it.
        dtype: of keys and values; torch's default dtype by default.
        device: of all buffers.

    Raises:
        TypeError, ValueError: an argument of another type or range, an unknown policy, a budget that the policy cannot
            work with.
    """

    tokens_seen: Tensor
    columns: Tensor
    _croppable: Tensor
    _query_index: Tensor
    _query_positions: Tensor

    def __init__(
        self,
        policy: Policy | str,
        budget: int,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        latent_rank: int | None = None,
        num_heads: int | None = None,
        batch_size: int = 1,
        interval: int = 128,
        max_step: int = 1,
        rotary: Rotary | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        policy = resolve_policy(policy)
        counts = {
            "budget": budget,
            "num_layers": num_layers,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "batch_size": batch_size,
            "interval": interval,
            "max_step": max_step,
        }
        for name, value in counts.items():
            check_count(name, value, 1)
        check_count("policy.query_window", policy.query_window, 0)
        if latent_rank is not None:
            check_count("latent_rank", latent_rank, 1)
            if num_kv_heads != 1:
                raise ValueError(f"num_kv_heads must be 1 for a latent cache, got {num_kv_heads}")
            if latent_rank > head_dim:
                raise ValueError(f"latent_rank must be at most head_dim {head_dim}, got {latent_rank}")
            if v_head_dim not in (None, latent_rank):
                raise ValueError(f"v_head_dim must be latent_rank {latent_rank} or None, got {v_head_dim}")
        v_head_dim = latent_rank or (head_dim if v_head_dim is None else v_head_dim)
        check_count("v_head_dim", v_head_dim, 1)
        if rotary is not None and not isinstance(rotary, Rotary):
            raise TypeError(f"rotary must be a Rotary or None, got {type(rotary).__name__}")
        if rotary is None and (policy.needs_rotary or policy.rerotate):
            raise ValueError(f"rotary must be given: {type(policy).__name__} needs the model's rotation, got None")
        if rotary is not None and rotary.end > head_dim:
            raise ValueError(f"rotary must rotate dims within head_dim {head_dim}, got dims up to {rotary.end}")
        if dtype is not None and dtype not in FLOATS:
            raise TypeError(f"dtype must be torch.float16, bfloat16, float32 or float64, got {dtype!r}")
        if num_heads is not None:
            check_count("num_heads", num_heads, 1)
            if num_heads % num_kv_heads:
                raise ValueError(f"num_heads must be a multiple of num_kv_heads {num_kv_heads}, got {num_heads}")
        policy.check(budget)

        self.policy = policy
        self.budget, self.interval, self.max_step = budget, interval, max_step
        self.num_layers, self.num_kv_heads, self.batch_size = num_layers, num_kv_heads, batch_size
        self.head_dim, self.v_head_dim, self.latent_rank = head_dim, v_head_dim, latent_rank
        self.capacity = budget + interval + max_step - 1
        with torch.inference_mode(False):  # buffers made under inference mode could not be written outside of it
            self.layers = nn.ModuleList(
                CacheLayer(
                    batch_size,
                    num_kv_heads,
                    self.capacity,
                    head_dim,
                    0 if latent_rank else v_head_dim,
                    dtype=dtype or torch.get_default_dtype(),
                    device=device,
                )
                for _ in range(num_layers)
            )
            kwargs: dict[str, Any] = {"device": device}
            self.rotary = None if rotary is None else copy.deepcopy(rotary).to(self.device)
            self.register_buffer("tokens_seen", torch.zeros(batch_size, dtype=torch.int64, **kwargs))
            self.register_buffer("columns", torch.zeros((), dtype=torch.int64, **kwargs))
            # Newest columns that crop() may take back: real for every row, and no compression since.
            self.register_buffer("_croppable", torch.zeros((), dtype=torch.int64, **kwargs))
            # What the ring of newest queries holds (see _window.py).
            ring = policy.query_window + max_step if policy.query_window else 0
            empty = torch.full((batch_size, ring), -1, dtype=torch.int64, **kwargs)
            self.register_buffer("_query_index", empty)
            self.register_buffer("_query_positions", empty.to(torch.int32))
        if ring and num_heads is not None:
            self._allocate_window(num_heads)
        self.num_heads = num_heads
        self._progress = _checks.Progress()

    # -- what a model calls ------------------------------------------------------------------------------------------

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attend to the cache and the new tokens, append them, compress where due.

        The result is :func:`fastattn.ops.attention`'s over what the cache holds and, causally, the new tokens: the two
        parts are merged by their log-sum-exps. It passes no gradient on; call it under ``torch.no_grad()``.

        Args:
            layer: index of the layer; the layers of a call come in order.
            query: ``[B, H, T, Dk]``, rotated as attention takes it (absorbed, for a latent cache). Query, key and value
                have the cache's dtype.
            key: ``[B, Hkv, T, Dk]``, rotated.
            value: ``[B, Hkv, T, Dv]``; None for a latent cache.
            position_ids: integers ``[B, T]`` (or ``[1, T]``), rising over a row's real tokens, on from those in the
                cache; by default each row's real tokens are counted.
            attention_mask: bool ``[B, T]``, False for padding; a row's real tokens are contiguous.
            scale: softmax scale, ``Dk ** -0.5`` by default; a latent cache must be given its own.

        Returns:
            ``[B, H, T, Dv]``, of the cache's dtype. What it holds at padding is unspecified but finite.

        Raises:
            TypeError, ValueError: arguments that do not fit or require a gradient, before anything is written.
            RuntimeError: an earlier call failed half-way; :meth:`reset` makes the cache usable again.
        """
        out = self._run(layer, query, key, value, position_ids, attention_mask, scale, attend=True)
        assert out is not None
        return out

    def update(
        self,
        layer: int,
        query: Tensor | None,
        key: Tensor,
        value: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> None:
        """Append and compress as :meth:`attend` does, for a module that computes the attention itself.

        Arguments and errors are :meth:`attend`'s; ``query`` may be None where :attr:`needs_queries` is False.
        """
        self._run(layer, query, key, value, position_ids, attention_mask, scale, attend=False)

    @property
    def needs_queries(self) -> bool:
        """The policy looks at queries, so that :meth:`update` must be given them."""
        return self.policy.query_window > 0

    # -- what a model, a framework or a user reads -------------------------------------------------------------------

    def keys(self, layer: int) -> Tensor:
        """Key buffer ``[B, Hkv, C, Dk]``; only the first ``lengths(layer)`` slots mean something."""
        return self._layer(layer).keys

    def values(self, layer: int) -> Tensor:
        """Value buffer ``[B, Hkv, C, Dv]``; for a latent cache a view of the keys."""
        chosen = self._layer(layer)
        return chosen.keys[..., : self.latent_rank] if self.latent_rank else chosen.values

    def positions(self, layer: int) -> Tensor:
        """Original positions int32 ``[B, Hkv, C]``, -1 where empty."""
        return self._layer(layer).positions

    def lengths(self, layer: int) -> Tensor:
        """Filled slots int32 ``[B, Hkv]``."""
        return self._layer(layer).lengths

    @property
    def nbytes(self) -> int:
        """Bytes of all state."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self._layer(0).keys.dtype

    @property
    def device(self) -> torch.device:
        """Of all state."""
        return self._layer(0).keys.device

    # -- what changes the whole cache --------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything, in place; also makes a cache usable again after a call that failed half-way."""
        with torch.no_grad():
            for chosen in self._all_layers():
                chosen.positions.fill_(-1)
                chosen.lengths.zero_()
            for counter in (self.tokens_seen, self.columns, self._croppable):
                counter.zero_()
            self._query_index.fill_(-1)
            self._query_positions.fill_(-1)
        self._progress.restart()

    def reorder(self, index: Tensor) -> None:
        """Row ``i`` becomes what row ``index[i]`` was (beam search), in place.

        Args:
            index: integers ``[B]``, each a row.

        Raises:
            TypeError, ValueError: not that.
            RuntimeError: the last call stopped half-way.
        """
        self._progress.require_complete()
        index = _checks.row_index(self, index)
        if index.shape[0] != self.batch_size:
            raise ValueError(f"index must have shape [{self.batch_size}], got {list(index.shape)}")
        with torch.no_grad():
            for buffer in self._row_buffers():
                buffer.copy_(buffer.index_select(0, index))

    def select(self, index: Tensor) -> CompressedKVCache:
        """A new cache of the rows ``index``, in that order, repeated as often as named.

        Args:
            index: integers ``[N]``, each a row, at least one.

        Raises:
            TypeError, ValueError: not that.
            RuntimeError: the last call stopped half-way.
        """
        self._progress.require_complete()
        index = _checks.row_index(self, index)
        if index.shape[0] == 0:
            raise ValueError("index must name at least one row, got none")
        with torch.inference_mode(False), torch.no_grad():
            chosen = CompressedKVCache(
                copy.deepcopy(self.policy),
                self.budget,
                num_layers=self.num_layers,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                v_head_dim=self.v_head_dim,
                latent_rank=self.latent_rank,
                num_heads=self.num_heads,
                batch_size=index.shape[0],
                interval=self.interval,
                max_step=self.max_step,
                rotary=self.rotary,
                dtype=self.dtype,
                device=self.device,
            )
            for new, old in zip(chosen._row_buffers(), self._row_buffers(), strict=True):
                new.copy_(old.index_select(0, index))
            chosen.columns.copy_(self.columns)
            chosen._croppable.copy_(self._croppable)
        return chosen

    def crop(self, tokens: int) -> None:
        """Take back the newest ``tokens`` real tokens of every row, and as many columns, in place.

        Args:
            tokens: how many, at least 0.

        Raises:
            TypeError: not an integer.
            ValueError: a row has fewer, a compression of any row came later, or those columns were padding for some
                row; then nothing changes.
            RuntimeError: the last call stopped half-way.
        """
        check_count("tokens", tokens, 0)
        self._progress.require_complete()
        if tokens == 0:
            return
        if int(self._croppable) < tokens:
            raise ValueError(
                f"tokens must be at most {int(self._croppable)}, the newest columns that hold a real token of every "
                f"row and have seen no compression since, got {tokens}"
            )
        with torch.no_grad():
            for chosen in self._all_layers():
                chosen.lengths.sub_(tokens)
                forget_beyond_lengths(chosen)
            for counter in (self.tokens_seen, self.columns, self._croppable):
                counter.sub_(tokens)
            forget_from_(self._query_index, self._query_positions, self.tokens_seen)

    # -- module machinery --------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As ``nn.Module``'s, but refuses a state of other shapes, or names if ``strict``, before copying anything."""
        _checks.check_state(self, state_dict, "", strict)
        with torch.inference_mode(False):
            return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """What loading does to a cache, also where it is a part of the model that is loaded."""
        _checks.check_state(self, state_dict, prefix, strict=False)
        for name, chosen in zip(_checks.window_names(self, prefix), self._all_layers(), strict=False):
            if name in state_dict and chosen.queries is None:
                self._allocate_window(state_dict[name].shape[1])
            elif chosen.queries is not None and _checks.holds_no_query(state_dict, prefix):
                state_dict.setdefault(name, chosen.queries)  # saved before its first call: there is nothing to load
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._progress.restart()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of pickle: what it makes under inference mode could not be written outside of it."""
        super().__setstate__(state)
        with torch.inference_mode(False):
            for module in self.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and buffer.is_inference():
                        module._buffers[name] = buffer.clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedKVCache:
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        with torch.inference_mode(False):
            copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        with torch.inference_mode(False):
            return super()._apply(fn, recurse)

    def extra_repr(self) -> str:
        return (
            f"policy={self.policy}, budget={self.budget}, interval={self.interval}, max_step={self.max_step}, "
            f"num_layers={self.num_layers}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"v_head_dim={self.v_head_dim}, latent_rank={self.latent_rank}, batch_size={self.batch_size}"
        )

    def _layer(self, layer: int) -> CacheLayer:
        _checks.layer_index(self, layer)
        return self.layers[layer]  # type: ignore[return-value]

    def _all_layers(self) -> list[CacheLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def _row_buffers(self) -> list[Tensor]:
        """Every buffer whose first dim is the batch."""
        per_layer = [buffer for chosen in self._all_layers() for buffer in chosen.buffers()]
        return [self.tokens_seen, self._query_index, self._query_positions, *per_layer]

    def _allocate_window(self, num_heads: int) -> None:
        for chosen in self._all_layers():
            chosen.allocate_window(num_heads, self._query_index.shape[1])
        self.num_heads = num_heads

    # -- the update itself -------------------------------------------------------------------------------------------

    def _run(
        self,
        layer: int,
        query: Tensor | None,
        key: Tensor,
        value: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        scale: float | None,
        attend: bool,
    ) -> Tensor | None:
        _checks.check_arguments(self, layer, query, key, value, position_ids, attention_mask, scale, attend)
        if query is not None and self.needs_queries and self._layer(layer).queries is None:
            if torch.compiler.is_compiling():
                raise ValueError(
                    "num_heads must be given to CompressedKVCache when its first call is compiled, got None"
                )
            self._allocate_window(query.shape[1])
        with torch.no_grad():
            call = Call(self, layer, query, key, value, position_ids, attention_mask, scale)
            if torch.compiler.is_compiling():
                return call.run(attend)
            with self._progress.guard(self, layer):
                return call.run(attend)
