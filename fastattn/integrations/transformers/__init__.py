"""Hugging Face transformers: ``generate`` and forward passes over a compressed key/value cache.

Importing this module registers the attention function ``"fastattn"`` and the mask function of the same name with
transformers. No model changes before :func:`compressed_cache` is called on it.
"""

from fastattn.integrations.deepseek import replace_attention_
from fastattn.integrations.transformers._cache import CompressedCache, compressed_cache
from fastattn.integrations.transformers._context import compressed
from fastattn.integrations.transformers._prefill import prefill
from fastattn.integrations.transformers._prefixes import (
    ContinuationScore,
    load_prefix,
    save_prefix,
    score_continuations,
)

__all__ = [
    "CompressedCache",
    "ContinuationScore",
    "compressed",
    "compressed_cache",
    "load_prefix",
    "prefill",
    "replace_attention_",
    "save_prefix",
    "score_continuations",
]
