"""One layer of a cache whose tokens are spread over ranks: this rank's tokens, and how many every rank has."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fastattn import ops
from fastattn.distributed.exchange import gather
from fastattn.modules.kv_cache.spec import LayerSpec

_NONE = torch.iinfo(torch.int32).max


class TokenShard(nn.Module):
    """This rank's slots of a layer, in time order: every row and head is a row of its own, ``N = rows * heads``.

    Args:
        spec: what the layer is made for.
        rows: of the batch.
        mesh: the ranks.
        skew: tokens that a rank may hold beyond an even share after a compression.
        dtype, device: of keys and values.
    """

    keys: Tensor  # [N, 1, C, Dk]
    values: Tensor  # [N, 1, C, Dv], width 0 for latents
    positions: Tensor  # int32 [N, 1, C], -1 = empty
    lengths: Tensor  # int32 [N, 1]
    counts: Tensor  # int32 [ranks, N]: the lengths of all ranks, which every rank works out by itself
    queries: Tensor | None

    def __init__(
        self, spec: LayerSpec, rows: int, mesh: DeviceMesh, skew: int, dtype: torch.dtype, device: torch.device | None
    ) -> None:
        super().__init__()
        self.spec, self.rows, self.mesh = spec, rows, mesh
        ranks, count = mesh.size(), rows * spec.num_kv_heads
        self.limit = -(-spec.budget // ranks) + skew
        self.capacity = max(self.limit, -(-spec.capacity // ranks))
        slots = (count, 1, self.capacity)
        self.register_buffer("keys", torch.zeros(*slots, spec.head_dim, dtype=dtype, device=device))
        self.register_buffer("values", torch.zeros(*slots, spec.stored_value_dim, dtype=dtype, device=device))
        self.register_buffer("positions", torch.full(slots, -1, dtype=torch.int32, device=device))
        self.register_buffer("lengths", torch.zeros(count, 1, dtype=torch.int32, device=device))
        self.register_buffer("counts", torch.zeros(ranks, count, dtype=torch.int32, device=device))
        self.register_buffer("queries", None)

    def totals(self) -> Tensor:
        """Tokens of all ranks, int32 ``[B, Hkv]``."""
        return self.counts.sum(0, dtype=torch.int32).view(self.rows, -1)

    def deal(self, position: Tensor) -> Tensor:
        """The rank that takes each new token, int64 ``[N, T]``: one after another, the rank that has fewest.

        Args:
            position: int32 ``[B, T]``, -1 at padding.
        """
        ranks, count = self.counts.shape
        tokens = position.shape[1]
        if tokens == 1:
            return self.counts.argmin(0)[:, None]
        index = torch.arange(ranks, device=position.device)[:, None, None]
        spread = int(self.counts.amax() - self.counts.amin())
        even = min(tokens, spread + 1)  # after so many tokens of each rank, turns are taken in order
        level = self.counts.long()[:, :, None] + torch.arange(even, device=position.device)
        turns = (level * ranks + index).permute(1, 0, 2).flatten(1).sort(1).values % ranks  # [N, ranks * even]
        if turns.shape[1] < tokens:
            first = spread * ranks - (self.counts - self.counts.amin(0)).sum(0)  # tokens until all are level
            rest = torch.arange(tokens, device=position.device) - first[:, None]
            turns = torch.where(rest >= 0, rest % ranks, nn.functional.pad(turns, (0, tokens - turns.shape[1])))
        real = (position >= 0).repeat_interleave(count // self.rows, 0)
        return turns[:, :tokens].gather(1, (real.cumsum(1) - 1).clamp(min=0))

    def with_room(self, tokens: int) -> TokenShard:
        """A copy with room for ``tokens`` more slots, to compress a prompt in."""
        larger = TokenShard.__new__(TokenShard)
        nn.Module.__init__(larger)
        larger.spec, larger.rows, larger.mesh, larger.limit = self.spec, self.rows, self.mesh, self.limit
        larger.capacity = self.capacity + tokens
        for name in ("keys", "values", "positions"):
            stored: Tensor = getattr(self, name)
            room = stored.new_full((stored.shape[0], 1, tokens, *stored.shape[3:]), -1 if name == "positions" else 0)
            larger.register_buffer(name, torch.cat([stored, room], 2))
        larger.register_buffer("lengths", self.lengths.clone())
        larger.register_buffer("counts", self.counts.clone())
        larger.register_buffer("queries", self.queries)
        return larger

    def take_over_(self, work: TokenShard) -> None:
        """Become what ``work`` holds, in place."""
        for name in ("keys", "values", "positions"):
            getattr(self, name).copy_(getattr(work, name)[:, :, : self.capacity])
        self.lengths.copy_(work.lengths)
        self.counts.copy_(work.counts)

    def append_(self, key: Tensor, value: Tensor | None, position: Tensor, owner: Tensor) -> None:
        """Append this rank's share of new tokens, ``[B, Hkv, T, D]``, dealt by :meth:`deal`."""
        heads = self.spec.num_kv_heads
        of_head = position.repeat_interleave(heads, 0)
        mine = torch.where(owner == self.mesh.get_local_rank(), of_head, -1).to(torch.int32)
        new = key.flatten(0, 1)[:, None]
        ops.cache_append_(
            self.keys, self.values, self.positions, self.lengths, new,
            new[..., :0] if value is None else value.flatten(0, 1)[:, None], mine,
        )  # fmt: skip
        ranks = torch.arange(self.counts.shape[0], device=owner.device)[:, None, None]
        self.counts += ((owner == ranks) & (of_head >= 0)).sum(2, dtype=torch.int32)

    def attend(self, query: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attention of ``query [B, H, T, D]`` to this rank's tokens: ``[B, H, T, Dv]`` and its lse."""
        rank = self.spec.latent_rank
        if rank is not None:
            latent, rope = query[..., :rank], query[..., rank:]
            return ops.latent_decode(
                latent, rope, self.keys[:, 0], self.lengths[:, 0], scale=scale, causal=False, return_lse=True
            )
        rows, heads = query.shape[:2]
        grouped = query.reshape(rows * self.spec.num_kv_heads, heads // self.spec.num_kv_heads, *query.shape[2:])
        out, lse = ops.decode_attention(
            grouped, self.keys, self.values, self.lengths, scale=scale, causal=False, return_lse=True
        )
        return out.view(rows, heads, *out.shape[2:]), lse.view(rows, heads, -1)

    def compact_(self, keep: Tensor) -> int:
        """Keep what ``keep``, bool ``[ranks, B, Hkv, W]``, says of all ranks. -> tokens that moved."""
        mine = keep[self.mesh.get_local_rank()].flatten(0, 1)[:, None]  # [N, 1, W]
        self._arrange_(mine, self.keys, self.values, self.positions)
        self.counts.copy_(keep.sum(3).flatten(1))
        self.lengths.copy_(self.counts[self.mesh.get_local_rank()][:, None])
        return self._rebalance_()

    def _arrange_(self, valid: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Fill the slots with the ``valid`` ones of ``[N, 1, W]`` tokens, in time order."""
        when = torch.where(valid, positions, _NONE)
        order = when.argsort(dim=2, stable=True)[..., : self.keys.shape[2]]
        when = when.gather(2, order)
        self.keys.copy_(keys.gather(2, order[..., None].expand(-1, -1, -1, keys.shape[3])))
        self.values.copy_(values.gather(2, order[..., None].expand(-1, -1, -1, values.shape[3])))
        self.positions.copy_(torch.where(when == _NONE, -1, when))

    def _rebalance_(self) -> int:
        """Where a rank holds more than the limit of a row and head, even shares: the ranks' newest tokens move."""
        ranks, me = self.counts.shape[0], self.mesh.get_local_rank()
        total = self.counts.sum(0)
        over = self.counts.amax(0) > (-(-total // ranks)).clamp(min=self.limit)
        if not bool(over.any()):
            return 0
        index = torch.arange(ranks, device=total.device, dtype=torch.int32)[:, None]
        fair = torch.where(over, total // ranks + (index < total % ranks), self.counts).to(torch.int32)
        given, taken = (self.counts - fair).clamp(min=0), (fair - self.counts).clamp(min=0)
        most = int(given.amax())
        place = torch.arange(most, device=total.device)
        source = (fair[me][:, None] + place).clamp(max=self.keys.shape[2] - 1)  # the newest given[me] of each row
        exists = place < given[me][:, None]
        position = torch.where(exists, self.positions[:, 0].gather(1, source.long()), -1)
        parts = [
            t[:, 0].gather(1, source.long()[..., None].expand(-1, -1, t.shape[3])) for t in (self.keys, self.values)
        ]
        every = [gather(part, self.mesh).transpose(0, 1).flatten(1, 2)[:, None] for part in (*parts, position)]
        offered = every[2] >= 0  # [N, 1, ranks * most], rank by rank
        turn = offered.cumsum(2) - 1
        start = taken[:me].sum(0)[:, None, None]
        arriving = offered & (turn >= start) & (turn < start + taken[me][:, None, None])
        slots = torch.arange(self.keys.shape[2], device=total.device)
        staying = slots < torch.minimum(fair[me], self.counts[me])[:, None, None]
        self._arrange_(
            torch.cat([staying, arriving], 2),
            torch.cat([self.keys, every[0]], 2),
            torch.cat([self.values, every[1]], 2),
            torch.cat([self.positions, every[2]], 2),
        )
        self.counts.copy_(fair)
        self.lengths.copy_(fair[me][:, None])
        return int(given.sum())
