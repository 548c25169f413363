"""Write a model of latent attention in the layout of DeepSeek-V3 checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.convert.attention import ReplacedProjection
from fastattn.convert.calibration import CHECKED_TOKENS, evaluating
from fastattn.convert.families import decoder_of, fresh_rotary
from fastattn.convert.storage import replaced_folder, untied
from fastattn.modules.low_rank import LowRankAttention

NORM_EPS = 1e-6  # of the latent norms in transformers' DeepSeek attention, whatever the configuration says


def export_deepseek_v3(model: nn.Module, path: str | Path) -> None:
    """Write ``model`` as a DeepSeek-V3 checkpoint of dense layers, which ``DeepseekV3ForCausalLM`` loads.

    The layout has a norm on every latent, one shape for all layers and evenly spaced rotary frequencies
    ``theta ** (-2 i / qk_rope_head_dim)``. A converted model that was not trained since has no norm on its latents and
    can't be exported; :mod:`examples.heal` can train with it.

    Args:
        model: Llama, Mistral, Qwen2, Phi-3 or alike, all of whose attention is :class:`~fastattn.LowRankAttention`.
        path: the folder; renamed into place when complete.

    Before anything is written, a DeepSeek-V3 model of the same tensors is compared with the model on a few tokens.

    Raises:
        ValueError: what the layout can't express, and where; other outputs, as scaled embeddings or other norms than
            Llama's give; a model on several devices.
    """
    import transformers
    from safetensors.torch import save_file

    decoder: Any = decoder_of(model)
    sites = [(index, layer.self_attn) for index, layer in enumerate(decoder.layers)]
    theta = _check_attention(sites, decoder.config)
    first: Any = sites[0][1]
    state = _named_as_deepseek(model)
    source = decoder.config
    config = transformers.DeepseekV3Config(
        vocab_size=source.vocab_size,
        hidden_size=source.hidden_size,
        intermediate_size=source.intermediate_size,
        num_hidden_layers=source.num_hidden_layers,
        num_attention_heads=first.num_heads,
        num_key_value_heads=first.num_heads,
        kv_lora_rank=first.kv_lora_rank,
        q_lora_rank=first.q_lora_rank,
        qk_nope_head_dim=first.qk_nope_head_dim,
        qk_rope_head_dim=first.qk_rope_head_dim,
        v_head_dim=first.v_head_dim,
        rope_interleave=first.rotary.interleave,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        attention_bias=first.o_proj.bias is not None,
        first_k_dense_replace=source.num_hidden_layers,
        num_mtp_layers=0,
        hidden_act=_setting(source, "hidden_act"),
        max_position_embeddings=_setting(source, "max_position_embeddings"),
        rms_norm_eps=_setting(source, "rms_norm_eps"),
        tie_word_embeddings=source.tie_word_embeddings,
        bos_token_id=source.bos_token_id,
        eos_token_id=source.eos_token_id,
        pad_token_id=source.pad_token_id,
    )
    config.architectures = ["DeepseekV3ForCausalLM"]
    config.dtype = first.o_proj.weight.dtype
    _check_outputs(model, config, state)
    with replaced_folder(Path(path)) as draft:
        config.save_pretrained(draft)
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(draft)
        save_file(untied(state), draft / "model.safetensors", metadata={"format": "pt"})


def _setting(config: Any, name: str) -> Any:
    """A setting that the layers of Llama and of DeepSeek-V3 have."""
    if not hasattr(config, name):
        raise ValueError(f"model must have layers like Llama's, got a {type(config).__name__} without {name}")
    return getattr(config, name)


def _check_outputs(model: nn.Module, config: Any, state: dict[str, Tensor]) -> None:
    """A DeepSeek-V3 model of ``config`` that holds the tensors themselves gives the model's logits.

    Catches what no attribute shows: scaled embeddings, residuals or logits, other norms, other rotary tables.
    """
    import transformers

    devices = {value.device for value in state.values()}
    if len(devices) > 1:
        raise ValueError(f"model must be on one device to export, got {sorted(map(str, devices))}")
    with torch.device("meta"):
        theirs: Any = transformers.DeepseekV3ForCausalLM(config)
    _, unknown = theirs.load_state_dict(state, strict=False, assign=True)
    theirs.tie_weights()
    missing = [name for name, value in theirs.named_parameters() if value.is_meta]
    if missing or unknown:
        raise ValueError(f"DeepSeek-V3's layers need {missing or 'no more'} and have no {unknown or 'less'}")
    theirs.model.rotary_emb = fresh_rotary(theirs.model)
    (device,) = devices
    theirs.to(device).eval()
    generator = torch.Generator("cpu").manual_seed(0)
    draw = torch.randint(config.vocab_size, (1, CHECKED_TOKENS), generator=generator, device="cpu")
    with evaluating(model):
        expected, got = (each(input_ids=draw.to(device), use_cache=False).logits.double() for each in (model, theirs))
    difference = float((got - expected).norm() / expected.norm().clamp_min(1e-30))
    allowed = 1e-3 if config.dtype in (torch.float32, torch.float64) else 5e-2
    if not difference <= allowed:
        raise ValueError(
            f"{type(model).__name__} does more than DeepSeek-V3's layers can: the same weights give logits that differ "
            f"by {difference:.2g} of their norm"
        )


def _check_attention(sites: list[tuple[int, Any]], config: Any) -> float:
    """Refuse attention that the layout can't hold; the base of the rotary frequencies otherwise."""
    _check_ranks([attention for _, attention in sites])
    shapes = set()
    for index, attention in sites:
        where = f"layer {index}"
        if not isinstance(attention, LowRankAttention):
            raise ValueError(f"{where} must be LowRankAttention to export, got {type(attention).__name__}")
        if attention.kv_a_layernorm is None:
            raise ValueError(
                f"{where} has latent_norm=False: DeepSeek-V3 puts a norm on every latent, which changes what an "
                "untuned converted model computes; train it with the norm first (examples/heal.py --norm)"
            )
        if attention.kv_a_layernorm.eps != NORM_EPS:
            raise ValueError(
                f"{where} must have norm_eps={NORM_EPS}, DeepSeek-V3's, got {attention.kv_a_layernorm.eps}"
            )
        up_query: Any = attention.q_proj if attention.q_lora_rank is None else attention.q_b_proj
        if up_query.bias is not None:
            raise ValueError(f"{where} has a bias on the query's heads (q_bias), which DeepSeek-V3 does not")
        if abs(attention.scale * attention.qk_head_dim**0.5 - 1) > 1e-6:
            raise ValueError(f"{where} must have the softmax scale of its head dim, got {attention.scale}")
        if attention.rotary.attention_factor != 1.0:
            raise ValueError(f"{where} multiplies rotary tables by {attention.rotary.attention_factor}: fold it first")
        shapes.add(
            (
                attention.num_heads,
                attention.qk_nope_head_dim,
                attention.v_head_dim,
                attention.o_proj.bias is not None,
                attention.rotary.interleave,
            )
        )
    if len(shapes) > 1:
        raise ValueError(f"all layers must have one shape in DeepSeek-V3's layout, got {sorted(map(str, shapes))}")
    return _rope_theta(sites, config)


def _check_ranks(layers: list[Any]) -> None:
    """Every layer has the same ranks and rope dims: the layout has one number each for all of them."""
    for name in ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim"):
        each = [getattr(attention, name) for attention in layers if isinstance(attention, LowRankAttention)]
        if len(set(each)) > 1:
            raise ValueError(
                f"{name} must be one number for all layers in DeepSeek-V3's layout, got {each}: convert with "
                'rank_allocation="uniform" and without kv_rank_budget'
            )


def _rope_theta(sites: list[tuple[int, Any]], config: Any) -> float:
    """The base whose evenly spaced frequencies every layer has."""
    first: Any = sites[0][1]
    dim = first.qk_rope_head_dim
    base = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", first.rope_theta)
    for theta in {float(base), first.rope_theta}:
        even = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim))
        if all(torch.allclose(module.inv_freq.cpu(), even, rtol=1e-5, atol=0) for _, module in sites):
            return theta
    raise ValueError(
        "rotary frequencies must be evenly spaced, theta ** (-2 i / qk_rope_head_dim), to export; convert with "
        f'rope_selection="uniform" and freq_fold = head_dim / qk_rope_head_dim, got {first.inv_freq.tolist()}'
    )


def _named_as_deepseek(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors under DeepSeek's names: norms and attention have them already, a fused MLP is split."""
    state: dict[str, Tensor] = {}
    markers = {name for name, module in model.named_modules() if isinstance(module, ReplacedProjection)}
    for name, value in model.state_dict().items():
        if name.endswith("self_attn.inv_freq") or name.rpartition(".")[0] in markers:
            continue
        if name.endswith("mlp.gate_up_proj.weight"):
            gate, up = value.chunk(2)
            prefix = name.removesuffix("gate_up_proj.weight")
            state[f"{prefix}gate_proj.weight"], state[f"{prefix}up_proj.weight"] = gate.clone(), up.clone()
            continue
        if ".mlp." in name and name.split(".mlp.")[1] not in _MLP:
            raise ValueError(f"DeepSeek-V3's dense layers have no {name}: only plain gated MLPs can be exported")
        state[name] = value
    return state


_MLP = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
