"""Layers of a model: the compressed key/value cache and its policies, low-rank attention, rotary embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastattn._lazy import lazy_exports

if TYPE_CHECKING:  # for type checkers, which do not read the table below
    from fastattn.modules.kv_cache import CompressedKVCache as CompressedKVCache
    from fastattn.modules.kv_cache import pyramid_budgets as pyramid_budgets
    from fastattn.modules.low_rank import LowRankAttention as LowRankAttention
    from fastattn.modules.policies import H2O as H2O
    from fastattn.modules.policies import TOVA as TOVA
    from fastattn.modules.policies import CacheState as CacheState
    from fastattn.modules.policies import ExpectedAttention as ExpectedAttention
    from fastattn.modules.policies import KeyDiff as KeyDiff
    from fastattn.modules.policies import Knorm as Knorm
    from fastattn.modules.policies import Policy as Policy
    from fastattn.modules.policies import Protect as Protect
    from fastattn.modules.policies import QueryWindow as QueryWindow
    from fastattn.modules.policies import Random as Random
    from fastattn.modules.policies import SnapKV as SnapKV
    from fastattn.modules.policies import StreamingLLM as StreamingLLM
    from fastattn.modules.policies import policy_names as policy_names
    from fastattn.modules.rotary import Rotary as Rotary

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "fastattn.modules.kv_cache": ("CompressedKVCache", "pyramid_budgets"),
        "fastattn.modules.low_rank": ("LowRankAttention",),
        "fastattn.modules.policies": (
            "CacheState",
            "ExpectedAttention",
            "KeyDiff",
            "Knorm",
            "Policy",
            "QueryWindow",
            "StreamingLLM",
            "TOVA",
            "SnapKV",
            "Random",
            "Protect",
            "H2O",
            "policy_names",
        ),
        "fastattn.modules.rotary": ("Rotary",),
    },
)
