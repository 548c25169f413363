"""The attention module that conversion puts into a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fastattn.integrations.low_rank import TransformersAttention


class ReplacedProjection(nn.Module):
    """Stands where the original had a projection, so that no checkpoint of a converted model fits the original.

    ``from_pretrained`` makes the original's attention and fills at random what a checkpoint lacks. A weight of another
    shape is an error there, and the name of the second buffer, which the error's report lists, says what loads it.
    """

    weight: Tensor
    load_with_fastattn_convert_load_low_rank: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("weight", "load_with_fastattn_convert_load_low_rank"):
            self.register_buffer(name, torch.zeros(1, dtype=torch.uint8, device="cpu"))

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *others: Any) -> None:
        """Loads nothing and misses nothing."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("a projection of converted attention must not be called: LowRankAttention replaced it")


class ConvertedAttention(TransformersAttention):
    """Low-rank attention whose construction can be written down, frequencies aside.

    Args:
        replaces: a projection of the original attention that this has not.
        others: see :class:`~fastattn.integrations.low_rank.TransformersAttention`.
    """

    def __init__(self, *args: Any, replaces: str = "k_proj", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.replaces = replaces
        self.add_module(replaces, ReplacedProjection())

    def arguments(self) -> dict[str, Any]:
        """The arguments that construct another such module, besides frequencies, index, device and dtype, for JSON."""
        low_rank_query = self.q_lora_rank is not None
        return {
            "hidden_size": self.hidden_size,
            "num_heads": self.num_heads,
            "kv_lora_rank": self.kv_lora_rank,
            "q_lora_rank": self.q_lora_rank,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "v_head_dim": self.v_head_dim,
            "rope_interleave": self.rotary.interleave,
            "latent_norm": self.kv_a_layernorm is not None,
            "bias": self.o_proj.bias is not None,
            "q_bias": (self.q_b_proj if low_rank_query else self.q_proj).bias is not None,
            "replaces": self.replaces,
        }
