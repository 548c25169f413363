"""More than one device, with PyTorch's own engine: plans, sharding strategies and caches over ``torch.distributed``.

Importing this package loads nothing of ``torch.distributed``; its names do, on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastattn._lazy import lazy_exports

if TYPE_CHECKING:  # for type checkers, which do not read the table below
    from fastattn.distributed.agreement import agree as agree
    from fastattn.distributed.heads import HeadShard as HeadShard
    from fastattn.distributed.spread_tokens import context_parallel as context_parallel
    from fastattn.distributed.strategies import register_strategies as register_strategies
    from fastattn.distributed.tensor_parallel import tensor_parallel_plan as tensor_parallel_plan
    from fastattn.distributed.token_cache import ContextParallelCache as ContextParallelCache

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "fastattn.distributed.agreement": ("agree",),
        "fastattn.distributed.spread_tokens": ("context_parallel",),
        "fastattn.distributed.token_cache": ("ContextParallelCache",),
        "fastattn.distributed.heads": ("HeadShard",),
        "fastattn.distributed.strategies": ("register_strategies",),
        "fastattn.distributed.tensor_parallel": ("tensor_parallel_plan",),
    },
)
