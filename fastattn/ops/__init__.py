"""fastattn's operators: functions that validate and document, each over one operator registered as ``fastattn::name``.

``fastattn.ops.reference`` holds their definitions in plain PyTorch under the same names.
"""

import importlib
from types import ModuleType

from fastattn.ops.attention import attention
from fastattn.ops.cache import cache_append_, cache_compact_
from fastattn.ops.decode import decode_attention, latent_decode
from fastattn.ops.mass import attention_mass
from fastattn.ops.merge import merge_attention
from fastattn.ops.qk import qk_scores
from fastattn.ops.quantize import dequantize, quantize
from fastattn.ops.scores import query_moments, score_expected_attention, score_key_diff, score_knorm

__all__ = [
    "attention",
    "attention_mass",
    "cache_append_",
    "cache_compact_",
    "decode_attention",
    "dequantize",
    "latent_decode",
    "merge_attention",
    "qk_scores",
    "quantize",
    "query_moments",
    "score_expected_attention",
    "score_key_diff",
    "score_knorm",
]


def __getattr__(name: str) -> ModuleType:
    if name == "reference":
        return importlib.import_module("fastattn.ops.reference")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}: it has {', '.join(__all__)} and reference")
