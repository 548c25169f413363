"""Assisted decoding over a compressed cache: drafts end where plain decoding would compress."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastattn.integrations.transformers import _versions
from fastattn.integrations.transformers._layers import ForwardedCache
from fastattn.modules.kv_cache import CompressedKVCache

_METHOD = "_get_candidate_generator"  # of a model: transformers 5.2 to 5.24 ask it once per generate()
_EARLIER = "_prepare_cache_for_generation"  # likewise, before 5.2 refuses what it takes for a static cache


def limit_drafts(model: Any) -> None:
    """Let drafts for ``model`` that are verified over a compressed cache be as long as the cache can take exactly."""
    for name, stand_in in ((_METHOD, _LimitedGenerators), (_EARLIER, _CheckedCaches)):
        if hasattr(type(model), name) and name not in vars(model):
            setattr(model, name, stand_in(model))


def draft_room(kv: CompressedKVCache, new: int) -> int:
    """Most draft tokens that a call with ``new`` certain tokens may verify as plain decoding would, at least 0.

    Every token must see the cache that it would see alone, and a rejected draft must leave no trace. So a step ends
    where a row or head becomes full, and a prompt brings a draft only where neither is compressed after it.
    """
    rooms = []
    for layer in kv._all_layers():
        spec, longest = layer.spec, int(layer.lengths.amax())
        if new > spec.max_step:
            rooms.append(spec.budget - longest)
        else:
            rooms.append(
                min(spec.max_step, spec.full_length - longest if longest < spec.full_length else spec.interval)
            )
    return max(0, min(rooms) - new)


class _LimitedGenerators:
    """In place of one model's method: what it returns, limited for calls that bring a compressed cache."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model_kwargs = kwargs.get("model_kwargs") or {}
        cache = next((model_kwargs[n] for n in _versions.CACHE_ARGUMENTS if model_kwargs.get(n) is not None), None)
        kv = getattr(cache, "kv", None) if isinstance(cache, ForwardedCache) else None
        generator = getattr(type(self.model), _METHOD)(self.model, *args, **kwargs)
        return generator if kv is None else _LimitedGenerator(generator, kv)


class _CheckedCaches:
    """In place of another method, which is told what ``generate`` is to do: refuses drafts that no cache takes back."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, config: Any, model_kwargs: dict[str, Any], mode: Any, *args: Any, **kwargs: Any) -> Any:
        cache = next((model_kwargs[n] for n in _versions.CACHE_ARGUMENTS if model_kwargs.get(n) is not None), None)
        kv = getattr(cache, "kv", None) if isinstance(cache, ForwardedCache) else None
        if kv is not None and kv.max_step == 1 and getattr(mode, "value", mode) == "assisted_generation":
            raise ValueError(
                "max_step must be at least 2 for assisted decoding, one more than the tokens of a draft: give it to "
                "compressed_cache, got 1"
            )
        return getattr(type(self.model), _EARLIER)(self.model, config, model_kwargs, mode, *args, **kwargs)


class _LimitedGenerator:
    """A candidate generator of transformers whose drafts are cut to what the cache can verify."""

    def __init__(self, generator: Any, kv: CompressedKVCache) -> None:
        self._generator, self._kv = generator, kv

    def get_candidates(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        candidates, logits = self._generator.get_candidates(input_ids, *args, **kwargs)
        length = input_ids.shape[1]
        room = draft_room(self._kv, length - int(self._kv.columns))
        return candidates[:, : length + room], None if logits is None else logits[:, :room]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)
