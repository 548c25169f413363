"""The up-projection of low-rank attention, applied to the latents or moved to the query and the output.

Expanded, every latent ``c`` is taken through the up-projection, ``k = W_UK c`` and ``v = W_UV c`` per head. Absorbed,
the query is taken through its transpose instead, ``q . W_UK c = (W_UK^T q) . c``, and the output latent through
``W_UV``.

Shapes are changed by methods of tensors, not by einops: torch.compile guards on einops' table of array types, and
compiled decoding would be compiled again when any other code shows einops a new one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def absorbs(queries: int, rank: int, nope_dim: int, value_dim: int) -> bool:
    r"""Whether ``queries`` new tokens cost at most as many FLOPs absorbed as expanded, over a long cache.

    Per head and cached token, ``T`` queries take :math:`2T(2R + d_r)` FLOPs absorbed; expanded they take
    :math:`2T(d_n + d_r + d_v)` and the expansion itself :math:`2R(d_n + d_v)`. Absorbed is cheaper as long as

    .. math:: T\,(2R - d_n - d_v) \le R\,(d_n + d_v)

    that is up to 170 queries at the DeepSeek dims (R = 512, d_n = d_v = 128). What is done once per query (taking it
    through the up-projection) does not grow with the cache and is left out. The rule needs no look at the device, so
    it chooses the same way in eager mode and in a compiled graph.
    """
    return queries * (2 * rank - nope_dim - value_dim) <= rank * (nope_dim + value_dim)


_STORED_AS_NUMBERS = (nn.Parameter, Tensor)  # other classes of tensors may stand for numbers that no view can show


def is_plain_linear(projection: nn.Module) -> bool:
    """Whether calling ``projection`` does nothing but multiply by the floating-point numbers in its ``weight``.

    Hooks that only spread the weight over ranks, ``projection.hooks_of_shard``, do nothing else.
    """
    if not isinstance(projection, nn.Linear) or type(projection).forward is not nn.Linear.forward:
        return False
    if projection.bias is not None or "forward" in projection.__dict__ or not projection.weight.is_floating_point():
        return False
    hooks = {*projection._forward_hooks, *projection._forward_pre_hooks}
    if "hooks_of_shard" in projection.__dict__:
        return hooks <= projection.__dict__["hooks_of_shard"]
    return not hooks and type(projection.weight) in _STORED_AS_NUMBERS


class UpProjection:
    """A layer's ``kv_b_proj`` during one call of the layer: ``W_UK [H, dn, R]`` over ``W_UV [H, dv, R]`` per head.

    The weight is taken from the module once per call and kept no longer: a loaded state_dict, an optimizer step or an
    edit in place shows in the next token.

    Args:
        projection: the module, linear in its input, ``R`` to ``H (dn + dv)``.
        num_heads: H.
        rank: R.
        nope_dim: dn.
    """

    def __init__(self, projection: nn.Module, num_heads: int, rank: int, nope_dim: int) -> None:
        self.projection, self.num_heads, self.rank, self.nope_dim = projection, num_heads, rank, nope_dim
        self._weight: Tensor | None = None

    def expand(self, latent: Tensor, rope_key: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``[B, H, S, dn + dr]`` and values ``[B, H, S, dv]`` of ``latent [B, S, R]``, ``rope_key [B, S, dr]``."""
        expanded = (
            self.projection(latent.contiguous()).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        )  # [B, H, S, dn + dv]
        key_nope, value = expanded[..., : self.nope_dim], expanded[..., self.nope_dim :]
        shared = rope_key[:, None].expand(-1, self.num_heads, -1, -1)  # one rope key for all heads
        return torch.cat([key_nope, shared], dim=-1), value

    def absorb(self, query_nope: Tensor) -> Tensor:
        """``W_UK^T q``: ``[B, H, T, dn]`` -> ``[B, H, T, R]``.

        Raises:
            ValueError: the projection has a bias.
        """
        key_up = self._per_head(query_nope)[:, : self.nope_dim]
        batch, _, tokens, _ = query_nope.shape
        product = torch.bmm(query_nope.transpose(0, 1).flatten(1, 2), key_up)  # [H, B T, R]
        return product.unflatten(1, (batch, tokens)).transpose(0, 1)

    def output(self, out_latent: Tensor) -> Tensor:
        """``W_UV o``: ``[B, H, T, R]`` -> ``[B, H, T, dv]``.

        The batch is folded into the vectors, so that the weights are read once, and the weights stand first: a
        transposed view of them would be copied on a CPU, at four times the cost of the product.

        Raises:
            ValueError: the projection has a bias.
        """
        value_up = self._per_head(out_latent)[:, self.nope_dim :]
        batch, _, tokens, _ = out_latent.shape
        product = torch.bmm(value_up, out_latent.transpose(0, 1).flatten(1, 2).mT)  # [H, dv, B T]
        return product.unflatten(2, (batch, tokens)).permute(2, 0, 3, 1)

    def _per_head(self, like: Tensor) -> Tensor:
        """The weight ``[H, dn + dv, R]``, in the dtype of the call's first vectors, ``like``."""
        if self._weight is None:
            self._weight = _weight_of(self.projection, self.rank, like).unflatten(0, (self.num_heads, -1))
        return self._weight


def _weight_of(projection: nn.Module, rank: int, like: Tensor) -> Tensor:
    """The matrix ``[H (dn + dv), R]`` that ``projection`` applies now, in ``like``'s dtype.

    A plain linear layer (parametrized or not) gives a view of its weight, of this rank's rows where it is spread over
    ranks. Anything else, such as an adapter around it, a quantized layer or weight, or a layer with hooks, is asked for
    its image of the unit vectors, so that nothing it does to its input is bypassed.
    """
    bias = getattr(projection, "bias", None)
    if (bias() if callable(bias) else bias) is not None:  # a method of torch's own quantized layers
        raise ValueError(
            f"kv_b_proj must have no bias to be absorbed into queries and outputs, got a {type(projection).__name__} "
            "with one"
        )
    if is_plain_linear(projection):
        weight = projection.weight
        assert isinstance(weight, Tensor)  # narrowed by is_plain_linear
        if "hooks_of_shard" in projection.__dict__:
            weight = weight.to_local()  # type: ignore[attr-defined]
        return weight.to(like.dtype)
    image: Tensor = projection(torch.eye(rank, dtype=like.dtype, device=like.device))
    return image.mT.to(like.dtype)
