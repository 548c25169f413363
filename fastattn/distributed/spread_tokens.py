"""From a cache of one process to one whose tokens are spread over ranks."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from fastattn.distributed.token_cache import ContextParallelCache
from fastattn.modules.kv_cache import CompressedKVCache


def context_parallel(cache: Any, mesh: DeviceMesh, *, skew: int | None = None) -> Any:
    """The same cache with its tokens spread over the ranks of a mesh; call it on every rank.

    Args:
        cache: still empty: a :class:`~fastattn.CompressedKVCache` (:meth:`LowRankAttention.make_cache` gives one too),
            of which a :class:`ContextParallelCache` is made; or what ``compressed_cache(model, ..., batch_size=rows)``
            gives, of which the :class:`ContextParallelCache` becomes the ``kv``.
        mesh, skew: as in :class:`ContextParallelCache`.

    Raises:
        TypeError, ValueError: no empty cache, or one that cannot be spread; on every rank.
    """
    kv = getattr(cache, "kv", cache)
    if not isinstance(kv, CompressedKVCache):
        raise TypeError(f"cache must be a CompressedKVCache or hold one, got {type(cache).__name__}")
    if int(kv.columns):
        raise ValueError(f"cache must be empty to be spread over ranks, got one that was fed {int(kv.columns)} columns")
    rotary: Any = kv._given_rotary()
    spread = ContextParallelCache(
        **kv._spec.arguments(dtype=kv.dtype), rotary=rotary, mesh=mesh, skew=skew, device=kv.device
    )
    if kv is cache:
        return spread
    if cache.has_windows or kv.max_step > 1:
        raise ValueError(
            "cache must be of a model without sliding windows, made with max_step=1, to be spread over ranks, got "
            f"max_step={kv.max_step}"
        )
    cache.take_kv(spread)
    return cache
