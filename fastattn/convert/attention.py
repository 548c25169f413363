"""The attention module that conversion puts into a model."""

from __future__ import annotations

from typing import Any

from fastattn.integrations.low_rank import TransformersAttention


class ConvertedAttention(TransformersAttention):
    """Low-rank attention whose construction can be written down, frequencies aside."""

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
        }
