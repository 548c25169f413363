"""Names in transformers that its releases share: of arguments that reach an attention module, and of rotary types.

Importing this needs no transformers. What differs between releases is in ``transformers/_versions.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

# The keyword argument that hands a compressed cache on from a model's forward to its attention calls.
CACHE_KEYWORD = "fastattn_cache"

# Keyword arguments that are known to change attention, with what they ask for. Each is refused where it is set and not
# served. This is the only such list.
CHANGES_ATTENTION = {
    "s_aux": "a learned attention sink",
    "sinks": "a learned attention sink",
    "softcap": "soft-capping of attention scores",
    "attn_logit_softcapping": "soft-capping of attention scores",
    "sliding_window": "a sliding window on a full-attention layer",
    "attention_chunk_size": "chunked attention",
    "output_attentions": "returning attention weights",
    "head_mask": "a head mask",
    "layer_head_mask": "a head mask",
    "cross_attn_head_mask": "a head mask",
    "alibi": "a bias on attention scores",
    "attention_bias": "a bias on attention scores",
    "attn_bias": "a bias on attention scores",
    "position_bias": "a bias on attention scores",
    "relative_position_bias": "a bias on attention scores",
    "block_mask": "a block mask",
    "block_table": "a paged cache",
    "block_tables": "a paged cache",
    "encoder_hidden_states": "cross-attention",
    "encoder_attention_mask": "cross-attention",
    "key_value_states": "cross-attention",
    "cu_seq_lens_q": "a packed batch of sequences",
    "cu_seq_lens_k": "a packed batch of sequences",
    "cu_seqlens": "a packed batch of sequences",
    "max_length_q": "a packed batch of sequences",
    "max_length_k": "a packed batch of sequences",
    "seq_idx": "a packed batch of sequences",
    "topk_indices": "sparse attention over chosen tokens",
}

# What attention calls name the features that a compressed cache serves, and what its own arguments are called.
SERVED_BY_CACHE = {
    "s_aux": "sinks",
    "sinks": "sinks",
    "softcap": "softcap",
    "attn_logit_softcapping": "softcap",
}

# Keyword arguments, tensors mostly, that are known to ask nothing of attention: no warning about them.
_HARMLESS = frozenset(
    {
        "cache_position",
        "input_ids",
        "inputs_embeds",
        "labels",
        "logits_to_keep",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "scaling",
        "token_type_ids",
        "use_cache",
    }
)
_WARNED: set[str] = set()


def check_arguments(arguments: Mapping[str, Any], server: str, served: Collection[str] = ()) -> None:
    """Refuse the arguments of an attention call that change attention; warn once about unknown tensors.

    What else comes (a tokenizer, stop strings) is for other parts of the model and is passed over. No value is shown:
    it may be as large as a tokenizer.

    Args:
        arguments: keyword arguments of an attention call.
        server: what serves it, for messages.
        served: names that change attention and are served.

    Raises:
        ValueError: an argument of :data:`CHANGES_ATTENTION` that is set, dropout, or is_causal=False.
    """
    for name, value in arguments.items():
        if name == "is_causal" and value is False:
            raise ValueError(f"is_causal must be True with {server}, which serves causal attention only")
        if name in _HARMLESS or name in served or value is None or value is False:
            continue
        if name == "dropout":
            if value == 0:
                continue
            raise ValueError(f"dropout must be 0 with {server}, got {value}: call model.eval()")
        if name in CHANGES_ATTENTION:
            number = f"={value:g}" if isinstance(value, (int, float)) and value is not True else ""
            raise ValueError(f"{CHANGES_ATTENTION[name]} is not supported by {server}, got the argument {name}{number}")
        if isinstance(value, Tensor) and name not in _WARNED and not torch.compiler.is_compiling():
            _WARNED.add(name)
            warnings.warn(
                f"{server} passes over the tensor {name} of an attention call, which it does not know", stacklevel=2
            )


# Rotary types whose frequencies do not depend on how long the text is, and those whose frequencies do.
FIXED_ROPE_TYPES = ("default", "linear", "yarn", "llama3", "proportional")
CHANGING_ROPE_TYPES = ("dynamic", "longrope")
