"""Multi-head latent attention: trained on full keys and values, decoded over a small latent cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastattn.modules.low_rank import paths
from fastattn.modules.low_rank import validation as check
from fastattn.modules.low_rank.absorption import UpProjection, absorbs
from fastattn.modules.low_rank.layers import LatentNorm, Projection
from fastattn.modules.low_rank.rope import LatentRotary, rope_frequencies, softmax_factor
from fastattn.modules.rotary import Rotary
from fastattn.validation import resolve_scale

if TYPE_CHECKING:
    from fastattn.modules.kv_cache import CompressedKVCache
    from fastattn.modules.policies import Policy


class LowRankAttention(nn.Module):
    r"""Multi-head latent attention with decoupled rotary keys (DeepSeek-V2, arXiv 2405.04434).

    A token's keys and values come from one latent :math:`c = \mathrm{norm}(W_a x)` of ``kv_lora_rank`` numbers and one
    rotary key :math:`r = \mathrm{rope}(W_r x)` that all heads share. Per head h, with a query ``[q^n | q^r]``:

    .. math:: k = [W^{UK}_h c \mid r], \quad v = W^{UV}_h c, \quad
              o = \mathrm{softmax}(\mathrm{scale}\; q \cdot k)\, v

    Training and prefill compute that (expanded). Decoding computes the same with the up-projections moved to the query
    and the output (absorbed), over a cache of ``kv_lora_rank + qk_rope_head_dim`` numbers per token. Parameter names
    and shapes are those of ``DeepseekV2Attention`` and ``DeepseekV3Attention`` in transformers.

    Args:
        hidden_size: width of the input and the output.
        num_heads: query heads H.
        kv_lora_rank: rank R of keys and values, at most ``2 * hidden_size``.
        q_lora_rank: rank of the query, at most ``2 * hidden_size``; None for a full-rank query.
        qk_nope_head_dim: dims per head without rotation, dn (0 is allowed).
        qk_rope_head_dim: rotated dims per head, dr, even.
        v_head_dim: value dims per head, dv.
        rope_theta: base of the rotary wavelengths.
        rope_interleave: rotate neighboring pairs (DeepSeek) instead of halves.
        rope_scaling: dict as in a transformers configuration, of type linear, llama3 or yarn. A yarn with
            ``mscale_all_dim`` also multiplies the softmax scale, as DeepSeek does.
        inv_freq: ``[dr / 2]`` frequencies to use instead (then saved in the state_dict, in float32).
        softmax_scale: replaces the default scale ``(dn + dr) ** -0.5`` and YaRN's factor on it.
        latent_norm: RMSNorm on the latents of key/value and query.
        bias: biases on the down-projections and the output (DeepSeek's ``attention_bias``).
        q_bias: a bias on the query of all heads.
        norm_eps: epsilon of the norms.
        device, dtype: of the parameters; torch's defaults by default. Frequencies stay float32.

    Raises:
        TypeError, ValueError: an argument of another type, or sizes that do not fit, naming both.
    """

    # What a rank holds of the heads, where fastattn.distributed has spread them: num_heads is then the rank's own.
    head_shard: Any = None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        kv_lora_rank: int = 512,
        q_lora_rank: int | None = None,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = 64,
        v_head_dim: int = 128,
        rope_theta: float = 10000.0,
        rope_interleave: bool = True,
        rope_scaling: Mapping[str, Any] | None = None,
        inv_freq: Tensor | None = None,
        softmax_scale: float | None = None,
        latent_norm: bool = True,
        bias: bool = False,
        q_bias: bool = False,
        norm_eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check.check_dims(
            hidden_size, num_heads, kv_lora_rank, q_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        )
        check.check_frequencies(inv_freq, qk_rope_head_dim, rope_theta, rope_scaling)
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.kv_lora_rank, self.q_lora_rank = kv_lora_rank, q_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.qk_head_dim, self.v_head_dim = qk_nope_head_dim + qk_rope_head_dim, v_head_dim
        self.rope_theta, self.rope_scaling = float(rope_theta), None if rope_scaling is None else dict(rope_scaling)
        self.scale = resolve_scale(softmax_scale, self.qk_head_dim)
        if softmax_scale is None:
            self.scale *= softmax_factor(rope_scaling)

        self._add_projections(latent_norm, bias, q_bias, norm_eps, {"device": device, "dtype": dtype})
        given, attention_factor = inv_freq is not None, 1.0
        if inv_freq is None:
            inv_freq, attention_factor = rope_frequencies(qk_rope_head_dim, rope_theta, rope_scaling)
        self.rotary = LatentRotary(
            inv_freq,
            interleave=rope_interleave,
            attention_factor=attention_factor,
            persistent=given,
            device=device,
        )
        self._buffers = self.rotary.table  # in a state_dict the frequencies stand beside the projections

    def _add_projections(
        self, latent_norm: bool, bias: bool, q_bias: bool, norm_eps: float, placement: dict[str, Any]
    ) -> None:
        """Projections and norms, in the order in which a seed has always filled them."""
        hidden_size, kv_lora_rank, q_lora_rank = self.hidden_size, self.kv_lora_rank, self.q_lora_rank
        query_rows = self.num_heads * self.qk_head_dim
        if q_lora_rank is None:
            self.q_proj = Projection(hidden_size, query_rows, bias=q_bias, **placement)
        else:
            self.q_a_proj = Projection(hidden_size, q_lora_rank, bias=bias, **placement)
            self.q_a_layernorm = LatentNorm(q_lora_rank, eps=norm_eps, **placement) if latent_norm else None
            self.q_b_proj = Projection(q_lora_rank, query_rows, bias=q_bias, **placement)
        self.kv_a_proj_with_mqa = Projection(hidden_size, kv_lora_rank + self.qk_rope_head_dim, bias=bias, **placement)
        self.kv_a_layernorm = LatentNorm(kv_lora_rank, eps=norm_eps, **placement) if latent_norm else None
        up_rows = self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        self.kv_b_proj = Projection(kv_lora_rank, up_rows, bias=False, **placement)
        self.o_proj = Projection(self.num_heads * self.v_head_dim, hidden_size, bias=bias, **placement)

    @property
    def inv_freq(self) -> Tensor:
        """The rotary module's frequencies ``[dr / 2]``."""
        return self.rotary.inv_freq

    @inv_freq.setter
    def inv_freq(self, value: Tensor) -> None:
        self.rotary.inv_freq = value

    def reset_parameters(self) -> None:
        """Initializes every projection, norm and frequency anew, as at construction."""
        for module in self.children():
            if isinstance(module, (Projection, LatentNorm, LatentRotary)):
                module.reset_parameters()

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: CompressedKVCache | None = None,
        layer: int = 0,
        causal: bool = True,
        absorb: bool | None = None,
    ) -> Tensor:
        """Attention of ``T`` tokens to each other and, with ``cache``, to the tokens before them.

        Args:
            hidden_states: ``[B, T, hidden_size]`` in the dtype of the weights (any float under autocast).
            position_ids: int ``[B, T]``; by default a row's real tokens are counted, from the cache's on.
            attention_mask: bool or integer ``[B, T]``, False or 0 for padding; a row's real tokens are contiguous.
            cache: a latent cache as :meth:`make_cache` gives; the new tokens are appended, then it compresses itself.
            layer: this module's index in ``cache``.
            causal: tokens attend to themselves and earlier ones only; with a cache always.
            absorb: True for the absorbed path, False for the expanded one. By default expanded without a cache and,
                with one, whichever takes fewer FLOPs for ``T`` queries over a long cache
                (:func:`fastattn.modules.low_rank.absorption.absorbs`: absorbed up to 170 queries at the DeepSeek dims).
                A cache whose policy rotates keys again is always attended to absorbed.

        Returns:
            ``[B, T, hidden_size]``. At padding, anything finite.

        Raises:
            TypeError, ValueError: an argument of another type or size than expected, naming both; no cache is changed.
        """
        check.check_input(hidden_states, self.hidden_size, self.kv_a_proj_with_mqa)
        batch, tokens, _ = hidden_states.shape
        attention_mask = check.bool_mask(attention_mask)
        check.check_positions(position_ids, hidden_states)
        check.check_mask(attention_mask, hidden_states)
        check.check_absorb(absorb)
        if cache is not None:
            check.check_cache(cache, layer, hidden_states, self.kv_lora_rank, self.qk_rope_head_dim, causal, absorb)
            check.check_owner(cache, layer, self)
        if position_ids is None:
            position_ids = self._default_positions(batch, tokens, attention_mask, cache, hidden_states.device)

        new = self._project(hidden_states, position_ids, attention_mask)
        if absorb is None:  # static, so that a compiled graph and eager mode choose alike
            absorb = cache is not None and (
                absorbs(tokens, self.kv_lora_rank, self.qk_nope_head_dim, self.v_head_dim)
                or cache.policy.rerotate
                or check.spreads_tokens(cache)
            )
        if self.head_shard is not None and torch.is_grad_enabled():
            new = self.head_shard.enter(new, absorb)
        up = self.up_projection()
        if cache is None:
            attend = paths.absorbed if absorb else paths.expanded
            out = attend(up, new, self.scale, causal)
        else:
            check.check_no_grad(new.query_rope, new.latent)
            attend_over = paths.absorbed_over_cache if absorb else paths.expanded_over_cache
            out = attend_over(up, new, self.scale, cache, layer)
        return self.o_proj(out.transpose(1, 2).flatten(2).contiguous())

    # Layers are handed contiguous inputs: kernels of quantized ones read memory as it lies.

    def _project(self, hidden_states: Tensor, position_ids: Tensor, mask: Tensor | None) -> paths.Projected:
        hidden_states = hidden_states.contiguous()
        queries = self._queries(hidden_states, position_ids)
        return paths.Projected(*queries, *self._latents(hidden_states, position_ids), position_ids, mask)

    def _queries(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, H, T, dn]`` and, rotated, ``[B, H, T, dr]``."""
        if self.q_lora_rank is None:
            query = self.q_proj(hidden_states)
        else:
            latent = self.q_a_proj(hidden_states).contiguous()
            if self.q_a_layernorm is not None:
                latent = self.q_a_layernorm(latent).contiguous()
            query = self.q_b_proj(latent)
        if query.shape[-1] != self.num_heads * self.qk_head_dim:
            raise ValueError(
                f"the query must have {self.num_heads} heads of {self.qk_head_dim} dims, got {query.shape[-1]} numbers "
                "per token: weights that are split between ranks (tensor parallel) are not supported"
            )
        query = query.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # [B, H, T, dn + dr]
        nope, rope = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        return nope, self.rotary.rotate(rope, position_ids)

    def _latents(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The normed latent ``[B, T, R]`` and the rotated key ``[B, T, dr]`` that all heads share."""
        compressed = self.kv_a_proj_with_mqa(hidden_states)
        latent, rope_key = compressed.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        if self.kv_a_layernorm is not None:
            latent = self.kv_a_layernorm(latent.contiguous())
        return latent, self.rotary.rotate(rope_key[:, None], position_ids)[:, 0]

    @staticmethod
    def _default_positions(
        batch: int, tokens: int, mask: Tensor | None, cache: CompressedKVCache | None, device: torch.device
    ) -> Tensor:
        """A row's real tokens counted, after the cache's; padding gets its neighbor's position."""
        if mask is None:
            position_ids = torch.arange(tokens, device=device).expand(batch, tokens)
        else:
            position_ids = (mask.cumsum(1) - 1).clamp(min=0)
        return position_ids if cache is None else position_ids + cache.tokens_seen[:, None]

    def make_cache(
        self,
        policy: Policy | str,
        budget: int,
        *,
        num_layers: int = 1,
        batch_size: int = 1,
        interval: int = 128,
        max_step: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        storage: str | None = None,
    ) -> CompressedKVCache:
        """A latent cache for ``num_layers`` layers like this one: ``R + dr`` numbers per token, stored once.

        Args:
            policy, budget, interval, max_step, storage: as in :class:`~fastattn.CompressedKVCache`.
            num_layers: layers that share the cache, each with its own ``layer`` index.
            batch_size: rows.
            dtype, device: the weights' by default (under autocast give its dtype).

        Raises:
            TypeError, ValueError: as :class:`~fastattn.CompressedKVCache` raises them.
        """
        from fastattn.modules.kv_cache import CompressedKVCache
        from fastattn.modules.policies import resolve_policy

        policy = resolve_policy(policy)
        return CompressedKVCache(
            policy if self.head_shard is None else self.head_shard.adapt(policy),
            budget,
            num_layers=num_layers,
            num_kv_heads=1,
            head_dim=self.kv_lora_rank + self.qk_rope_head_dim,
            latent_rank=self.kv_lora_rank,
            num_heads=self.num_heads,
            batch_size=batch_size,
            interval=interval,
            max_step=max_step,
            storage=storage,
            rotary=self.latent_rotary(),
            dtype=dtype or check.float_dtype(self.kv_a_proj_with_mqa) or torch.get_default_dtype(),
            device=device or check.device_of(self.kv_a_proj_with_mqa) or self.inv_freq.device,
        )

    def latent_rotary(self) -> Rotary:
        """The rotation of a latent cache's rows ``[latent | rope key]``."""
        return Rotary(
            self.inv_freq,
            interleave=self.rotary.interleave,
            attention_factor=self.rotary.attention_factor,
            start=self.kv_lora_rank,
        )

    def latent_query_and_key(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Absorbed queries ``[B, H, T, R + dr]`` and the keys ``[B, 1, T, R + dr]`` that a latent cache stores."""
        new = self._project(hidden_states, position_ids, None)
        return paths.absorbed_query(self.up_projection(), new), new.latent_key

    def up_projection(self) -> UpProjection:
        """The up-projection of keys and values, to be used within one call."""
        return UpProjection(self.kv_b_proj, self.num_heads, self.kv_lora_rank, self.qk_nope_head_dim)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        exact = self.inv_freq
        super()._apply(fn, recurse)  # goes through the rotary module's buffers once more, as this module's
        self.rotary.restore(exact)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.inv_freq = self.inv_freq.float()  # load_state_dict(assign=True) puts another tensor

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, kv_lora_rank={self.kv_lora_rank}, "
            f"q_lora_rank={self.q_lora_rank}, qk_nope_head_dim={self.qk_nope_head_dim}, "
            f"qk_rope_head_dim={self.qk_rope_head_dim}, v_head_dim={self.v_head_dim}, scale={self.scale:.6g}"
        )
