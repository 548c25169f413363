"""fastattn: attention made cheaper along two axes, rank (LowRankAttention) and tokens (CompressedKVCache)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastattn._lazy import lazy_exports

if TYPE_CHECKING:  # for type checkers, which do not read the table below
    from fastattn import convert as convert
    from fastattn import modules as modules
    from fastattn import ops as ops
    from fastattn.advice import Advice as Advice
    from fastattn.advice import advise as advise
    from fastattn.convert import LowRankConfig as LowRankConfig
    from fastattn.convert import to_low_rank_ as to_low_rank_
    from fastattn.integrations.transformers import compressed as compressed
    from fastattn.integrations.transformers import compressed_cache as compressed_cache
    from fastattn.integrations.transformers import load_prefix as load_prefix
    from fastattn.integrations.transformers import prefill as prefill
    from fastattn.integrations.transformers import save_prefix as save_prefix
    from fastattn.integrations.transformers import score_continuations as score_continuations
    from fastattn.modules import H2O as H2O
    from fastattn.modules import TOVA as TOVA
    from fastattn.modules import CacheState as CacheState
    from fastattn.modules import CompressedKVCache as CompressedKVCache
    from fastattn.modules import ExpectedAttention as ExpectedAttention
    from fastattn.modules import KeyDiff as KeyDiff
    from fastattn.modules import Knorm as Knorm
    from fastattn.modules import LowRankAttention as LowRankAttention
    from fastattn.modules import Policy as Policy
    from fastattn.modules import Protect as Protect
    from fastattn.modules import Random as Random
    from fastattn.modules import Rotary as Rotary
    from fastattn.modules import SnapKV as SnapKV
    from fastattn.modules import StreamingLLM as StreamingLLM
    from fastattn.modules import pyramid_budgets as pyramid_budgets

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "fastattn.advice": ("Advice", "advise"),
        "fastattn.convert": ("LowRankConfig", "to_low_rank_"),
        "fastattn.integrations.transformers": (
            "compressed",
            "compressed_cache",
            "load_prefix",
            "prefill",
            "save_prefix",
            "score_continuations",
        ),
        "fastattn.modules": (
            "CacheState",
            "CompressedKVCache",
            "ExpectedAttention",
            "KeyDiff",
            "Knorm",
            "LowRankAttention",
            "Policy",
            "Rotary",
            "StreamingLLM",
            "pyramid_budgets",
            "TOVA",
            "SnapKV",
            "Random",
            "Protect",
            "H2O",
        ),
    },
    submodules=("convert", "modules", "ops"),
    extras={"transformers": "transformers"},
)
