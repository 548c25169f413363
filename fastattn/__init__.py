"""fastattn: attention made cheaper along two axes, rank (LowRankAttention) and tokens (CompressedKVCache)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastattn import convert, ops
    from fastattn.advice import Advice, advise
    from fastattn.convert.config import LowRankConfig
    from fastattn.convert.conversion import to_low_rank_
    from fastattn.modules.kv_cache import CompressedKVCache
    from fastattn.modules.low_rank import LowRankAttention
    from fastattn.modules.policies import ExpectedAttention, KeyDiff, Knorm, Policy, StreamingLLM
    from fastattn.modules.rotary import Rotary

__version__ = "0.1.0"

# Public name -> module. Loaded on first use, so that `import fastattn` costs what `import torch` costs.
_EXPORTS = {
    "Advice": "fastattn.advice",
    "CompressedKVCache": "fastattn.modules.kv_cache",
    "ExpectedAttention": "fastattn.modules.policies",
    "KeyDiff": "fastattn.modules.policies",
    "Knorm": "fastattn.modules.policies",
    "LowRankAttention": "fastattn.modules.low_rank",
    "LowRankConfig": "fastattn.convert.config",
    "Policy": "fastattn.modules.policies",
    "Rotary": "fastattn.modules.rotary",
    "StreamingLLM": "fastattn.modules.policies",
    "advise": "fastattn.advice",
    "to_low_rank_": "fastattn.convert.conversion",
}
_SUBMODULES = ("convert", "ops")

__all__ = [
    "Advice",
    "CompressedKVCache",
    "ExpectedAttention",
    "KeyDiff",
    "Knorm",
    "LowRankAttention",
    "LowRankConfig",
    "Policy",
    "Rotary",
    "StreamingLLM",
    "advise",
    "convert",
    "ops",
    "to_low_rank_",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"fastattn.{name}")
    if name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'fastattn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
