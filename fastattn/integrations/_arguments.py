"""Names in transformers that its releases share: of arguments that reach an attention module, and of rotary types.

Importing this needs no transformers. What differs between releases is in ``transformers/_versions.py``.
"""

from __future__ import annotations

# The keyword argument that hands a compressed cache on from a model's forward to its attention calls.
CACHE_KEYWORD = "fastattn_cache"

# Keyword arguments that ask nothing of the attention itself.
_HARMLESS = frozenset(
    {
        "use_cache",
        "cache_position",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "logits_to_keep",
    }
)
# The same for an attention function, which gets the rotated queries and keys and their scale beside them.
HARMLESS_FOR_FUNCTIONS = _HARMLESS | {"position_ids", "scaling", "position_embeddings"}
# The same for an attention module; it looks at output_attentions itself, and training hands it what the loss needs.
HARMLESS_FOR_MODULES = _HARMLESS | {"output_attentions", "labels", "num_items_in_batch"}

# Rotary types whose frequencies do not depend on how long the text is, and those whose frequencies do.
FIXED_ROPE_TYPES = ("default", "linear", "yarn", "llama3", "proportional")
CHANGING_ROPE_TYPES = ("dynamic", "longrope")
