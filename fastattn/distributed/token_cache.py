"""Context parallelism for decoding: a compressed cache whose tokens are spread over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fastattn import ops
from fastattn.distributed.agreement import agree, check_mesh
from fastattn.distributed.exchange import agree_on_tokens, gather
from fastattn.distributed.token_checks import check_new_tokens, check_spec
from fastattn.distributed.token_scores import best_of_all, local_scores, pack
from fastattn.distributed.token_shard import TokenShard
from fastattn.modules.kv_cache.call import NewTokens
from fastattn.modules.kv_cache.query_ring import QueryRing, write_queries_
from fastattn.modules.kv_cache.spec import CacheSpec, LayerSpec
from fastattn.modules.policies import CacheState, Policy, QueryWindow, resolve_policy
from fastattn.modules.rotary import Rotary
from fastattn.validation import check_count, check_size, check_tensor, resolve_scale


class ContextParallelCache(nn.Module):
    """:class:`~fastattn.CompressedKVCache`, with the tokens of every row and head spread over the ranks of a mesh.

    Every rank runs the model and calls :meth:`attend` with the same tokens. A rank attends to its own part of the
    cache; one all-gather per layer brings the parts' outputs and log-sum-exps together, which every rank merges. New
    tokens go, one by one, to the rank that has fewest. A compression scores tokens where they lie, gathers scores and
    positions (8 bytes per token and head, no keys), and every rank chooses the same ``budget`` best of all: what is
    kept is what one process keeps. Keys move only where a rank is left with more than ``ceil(budget / ranks) + skew``.

    A prompt is attended to in full by every rank; what is stored of it is spread at once. Eager mode only. Not served:
    policies that keep numbers per slot (H2O) or rotate anew, quantised storage, :meth:`crop`, saving.

    Args:
        policy, budget, num_layers, num_kv_heads, head_dim, v_head_dim, latent_rank, num_heads, batch_size, interval,
            max_step, rotary, dtype, device: as in :class:`~fastattn.CompressedKVCache`, for all ranks together.
        mesh: of one dim: the ranks that share the tokens.
        skew: tokens that a rank may hold of a row and head beyond an even share of the budget; by default a quarter of
            that share. Memory is ``max(ceil(budget / ranks) + skew, ceil(capacity / ranks))`` slots per row and head.

    Raises:
        TypeError, ValueError: an argument that does not fit, on every rank; ranks that were given different ones.
    """

    def __init__(
        self,
        policy: Policy | str,
        budget: int,
        *,
        mesh: DeviceMesh,
        skew: int | None = None,
        rotary: Rotary | None = None,
        device: torch.device | str | None = None,
        **sizes: Any,
    ) -> None:
        super().__init__()
        self.token_mesh = check_mesh(mesh)
        spec = self._spec = CacheSpec(resolve_policy(policy), budget, rotary=rotary, **sizes)
        check_spec(spec, rotary)
        if skew is not None:
            check_count("skew", skew, 0)
        agree(mesh, "the cache's arguments", ({k: repr(v) for k, v in spec.arguments().items()}, skew))
        dtype, ranks = spec.dtype or torch.get_default_dtype(), mesh.size()
        device = torch.device(device) if device is not None else torch.get_default_device()
        shares = [-(-spec.layer(layer).budget // ranks) for layer in range(spec.num_layers)]
        with torch.inference_mode(False):
            self.layers = nn.ModuleList(
                TokenShard(
                    spec.layer(index), spec.batch_size, mesh, share // 4 if skew is None else skew, dtype, device
                )
                for index, share in enumerate(shares)
            )
            self.rotary = rotary
            rows, ring = spec.batch_size, spec.ring_size
            self.register_buffer("tokens_seen", torch.zeros(rows, dtype=torch.int64, device=device))
            self.register_buffer("columns", torch.zeros((), dtype=torch.int64, device=device))
            self.register_buffer("_newest", torch.full((rows,), -1, dtype=torch.int64, device=device))
            self.register_buffer("_query_index", torch.full((rows, ring), -1, dtype=torch.int64, device=device))
            self.register_buffer("_query_positions", torch.full((rows, ring), -1, dtype=torch.int32, device=device))
        self._next, self._failed, self._held = 0, "", False
        self.moved = 0

    # -- what a model calls ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """:meth:`CompressedKVCache.attend <fastattn.CompressedKVCache.attend>` over the tokens of all ranks.

        Returns:
            ``[B, H, T, Dv]``, the same bits on every rank.

        Raises:
            TypeError, ValueError: arguments that do not fit; ranks that bring different tokens, on every rank.
            RuntimeError: another rank stopped; or an earlier call failed, after which :meth:`reset` is needed.
        """
        if torch.compiler.is_compiling():
            raise ValueError("a cache whose tokens are spread over ranks runs in eager mode: do not compile its calls")
        new = NewTokens(layer, query, key, value, position_ids, attention_mask, scale, attend=True)
        new.convert_(self.dtype)
        if self._failed:
            raise RuntimeError(f"the cache is invalid since {self._failed}: call reset() on every rank to use it again")
        check_new_tokens(self._spec, new, self._next, self.dtype, self.device)
        position = self._positions(new)
        prompt = key.shape[2] > self.max_step or not self._held
        if layer == 0 and prompt:
            agree_on_tokens(new.key, position, self.token_mesh)  # nothing is written yet
        try:
            out = self._update(new, position, resolve_scale(scale, self.layer_spec(layer).head_dim))
        except BaseException as error:
            self._failed = f"layer {layer} failed with {type(error).__name__}"
            raise
        self._next = (layer + 1) % self.num_layers
        return out

    def _update(self, new: NewTokens, position: Tensor, scale: float) -> Tensor:
        assert new.query is not None
        shard: Any = self.layers[new.layer]
        step = new.key.shape[2] <= self.max_step
        brings = (position >= 0).any(1)
        window = QueryWindow(new.query, position)
        if step and self._held:
            due = (shard.totals() >= shard.spec.full_length) & brings[:, None]
            self._compress(shard, new.layer, due, self._newest + 1, scale, None, self._ring())
        out = self._attend(shard, new, position, scale)
        ring = self._store_queries(shard, new.query, position)
        owner = shard.deal(position)
        if step:
            shard.append_(new.key, new.value, position, owner)
        else:
            room = int((owner == torch.arange(shard.counts.shape[0], device=owner.device)[:, None, None]).sum(2).amax())
            work = shard.with_room(room)
            work.append_(new.key, new.value, position, owner)
            due = (work.totals() > shard.spec.budget) & brings[:, None]
            self._compress(work, new.layer, due, position.amax(1).long() + 1, scale, window, ring)
            shard.take_over_(work)
        if new.layer == self.num_layers - 1:
            self._advance(position, ring)
        return out

    def _attend(self, shard: TokenShard, new: NewTokens, position: Tensor, scale: float) -> Tensor:
        """To this rank's part before the call, to the call's own tokens, and what the other ranks found."""
        query = new.query
        assert query is not None
        value = new.key[..., : shard.spec.latent_rank] if new.value is None else new.value
        start = end = None
        if new.attention_mask is not None:
            start = new.attention_mask.to(torch.int32).argmax(1).to(torch.int32)
            end = start + new.attention_mask.sum(1, dtype=torch.int32)
        inside = ops.attention(
            query, new.key, value, causal=True, scale=scale, key_start=start, lengths=end, return_lse=True
        )
        if not self._held:
            return inside[0]
        out, lse = shard.attend(query, scale)
        mark = query.to(lse.dtype).sum((1, 2, 3), keepdim=True).expand(*lse.shape, 1)
        every = gather(torch.cat([out.to(lse.dtype), lse[..., None], mark], -1), self.token_mesh)
        if new.layer == 0 and every.device.type == "cpu":
            self._check_marks(every[:, :, 0, 0, -1])
        outs = [*every[..., :-2].to(out.dtype).unbind(0), inside[0]]
        return ops.merge_attention(outs, [*(one.contiguous() for one in every[..., -2].unbind(0)), inside[1]])[0]

    def _check_marks(self, marks: Tensor) -> None:
        if bool(((marks - marks[0]).abs() > 1e-2 * (1 + marks[0].abs())).any()):
            raise ValueError(
                "query must be the same on every rank of a cache whose tokens are spread over them, got queries whose "
                f"sums are {marks.tolist()}: the ranks were fed different tokens"
            )

    def _compress(
        self,
        shard: TokenShard,
        layer: int,
        due: Tensor,
        next_position: Tensor,
        scale: float,
        call: QueryWindow | None,
        ring: QueryRing,
    ) -> None:
        """Keep the best of the rows and heads that are ``due``: one collective of scores, more where they need it."""
        if not bool(due.any()):
            return
        spec, rows = shard.spec, self.batch_size
        queries = shard.queries
        keys, positions = (t[:, 0].unflatten(0, (rows, -1)) for t in (shard.keys, shard.positions))
        values = keys[..., : spec.latent_rank] if spec.latent_rank else shard.values[:, 0].unflatten(0, (rows, -1))
        state = CacheState(
            keys=keys,
            values=values,
            positions=positions,
            lengths=shard.lengths.view(rows, -1),
            tokens_seen=self.tokens_seen,
            next_position=next_position,
            scale=scale,
            rotary=self.rotary,
            min_length=0,
            latent=spec.latent_rank is not None,
            window=None if queries is None else ring.newest(queries, self.policy.query_window),
            call=call,
            layer=layer,
            budget=spec.budget,
        )
        scores, finish = local_scores(self.policy, state, self.token_mesh)
        gathered = gather(pack(scores, torch.where(state.valid, positions, -1)), self.token_mesh)
        self.moved += shard.compact_(best_of_all(gathered, scores.dtype, finish, spec.budget, due))

    # -- the newest queries, and counters ----------------------------------------------------------------------------

    def _ring(self) -> QueryRing:
        return QueryRing(self._query_index, self._query_positions)

    def _store_queries(self, shard: Any, query: Tensor, position: Tensor) -> QueryRing:
        """The new queries in the layer's, and the ring that names them, which is written with the last layer."""
        ring = self._ring()
        if ring.size == 0:
            return ring
        if shard.queries is None:
            shard.queries = query.new_zeros(*query.shape[:2], ring.size + 1, query.shape[3])
        place, index = ring.places(self.tokens_seen, position)
        write_queries_(shard.queries, place, query)
        return ring.after_call(place, index, position)

    def _advance(self, position: Tensor, ring: QueryRing) -> None:
        self._query_index.copy_(ring.index)
        self._query_positions.copy_(ring.positions)
        self.tokens_seen += (position >= 0).sum(1)
        self.columns += position.shape[1]
        self._newest.copy_(torch.maximum(self._newest, position.amax(1).long()))
        self._held = True

    def _positions(self, new: NewTokens) -> Tensor:
        mask, tokens = new.attention_mask, new.key.shape[2]
        if new.position_ids is not None:
            position = new.position_ids.expand(self.batch_size, -1)
        elif mask is not None:
            position = self.tokens_seen[:, None] + mask.cumsum(1) - 1
        else:
            position = self.tokens_seen[:, None] + torch.arange(tokens, device=new.key.device)
        position = position.to(torch.int32)
        return position if mask is None else position.masked_fill(~mask, -1)

    # -- the cache as a whole ----------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything, in place; call it on every rank."""
        for shard in self._shards():
            shard.positions.fill_(-1)
            shard.lengths.zero_()
            shard.counts.zero_()
        self.tokens_seen.zero_()
        self.columns.zero_()
        self._newest.fill_(-1)
        self._query_index.fill_(-1)
        self._query_positions.fill_(-1)
        self._next, self._failed, self._held = 0, "", False

    def reorder(self, index: Tensor) -> None:
        """Row ``i`` becomes what row ``index[i]`` was (beam search), in place; call it alike on every rank."""
        check_tensor("index", index, "B")
        check_size("index", index, 0, self.batch_size, "the cache's batch size")
        with torch.no_grad():
            for shard in self._shards():
                rows = (
                    index[:, None] * self.num_kv_heads + torch.arange(self.num_kv_heads, device=index.device)
                ).flatten()
                for name in ("keys", "values", "positions", "lengths"):
                    getattr(shard, name).copy_(getattr(shard, name)[rows])
                shard.counts.copy_(shard.counts[:, rows])
                if shard.queries is not None:
                    shard.queries.copy_(shard.queries[index])
            for counter in (self.tokens_seen, self._newest, self._query_index, self._query_positions):
                counter.copy_(counter[index])

    def crop(self, tokens: int) -> None:
        """Not served: raises where ``tokens`` is not 0."""
        if tokens:
            raise ValueError(
                f"tokens must be 0: a cache whose tokens are spread over ranks takes none back, got {tokens}"
            )

    def positions(self, layer: int) -> Tensor:
        """Positions of the tokens of all ranks in time order, int32 ``[B, Hkv, C]``, -1 behind: one collective."""
        shard: Any = self.layers[layer]
        every = gather(shard.positions, self.token_mesh).permute(1, 2, 0, 3).flatten(1)
        last = torch.iinfo(torch.int32).max
        slots = torch.arange(shard.capacity, device=every.device).repeat(self.token_mesh.size())
        rank = torch.arange(self.token_mesh.size(), device=every.device).repeat_interleave(shard.capacity)
        found = torch.where(slots < shard.counts.T[:, rank], every, last).sort(1).values
        found = found[:, : shard.spec.capacity]
        return torch.where(found == last, -1, found).view(self.batch_size, self.num_kv_heads, -1)

    def lengths(self, layer: int) -> Tensor:
        """Tokens of all ranks, int32 ``[B, Hkv]``."""
        shard: Any = self.layers[layer]
        return shard.totals()

    def rank_lengths(self, layer: int) -> Tensor:
        """Tokens of each rank, int32 ``[ranks, B, Hkv]``."""
        shard: Any = self.layers[layer]
        return shard.counts.view(-1, self.batch_size, self.num_kv_heads)

    def layer_spec(self, layer: int) -> LayerSpec:
        """What ``layer`` is made for, on all ranks together."""
        return self._spec.layer(layer)

    def _shards(self) -> Iterator[Any]:
        yield from self.layers

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return next(self._shards()).keys.dtype

    @property
    def device(self) -> torch.device:
        """Of all buffers."""
        return next(self._shards()).keys.device

    def __getattr__(self, name: str) -> Any:
        """``policy``, ``budget``, ``batch_size``, ...: what the cache is made for."""
        if name in _OF_SPEC:
            return getattr(self._spec, name)
        return super().__getattr__(name)


_OF_SPEC = frozenset(
    {"policy", "budget", "interval", "max_step", "num_layers", "num_heads", "num_kv_heads", "head_dim", "latent_rank"}
    | {"batch_size", "storage"}
)
