"""Hugging Face transformers: ``generate`` and forward passes over a compressed key/value cache.

Importing this module registers the attention function ``"fastattn"`` and the mask function of the same name with
transformers. No model changes before :func:`compressed_cache` is called on it.
"""

from fastattn.integrations.deepseek import replace_attention_
from fastattn.integrations.transformers._cache import CompressedCache, compressed_cache
from fastattn.integrations.transformers._context import compressed
from fastattn.integrations.transformers._prefill import prefill

__all__ = ["CompressedCache", "compressed", "compressed_cache", "prefill", "replace_attention_"]
