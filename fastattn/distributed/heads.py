"""Which heads a rank holds, and policies that choose for them as one process chooses for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fastattn.modules.policies import (
    H2O,
    TOVA,
    CacheState,
    ExpectedAttention,
    KeyDiff,
    Knorm,
    Policy,
    Protect,
    Random,
    SnapKV,
    StreamingLLM,
)

if TYPE_CHECKING:
    from fastattn.modules.low_rank.paths import Projected

# A head's score depends on its own tokens alone; on them and the queries of its group; on all heads of the layer; on
# the head's index.
_OF_TOKENS, _OF_GROUP, _OF_LAYER, _OF_INDEX = "tokens", "group", "layer", "index"
_DEPENDENCE: dict[type[Policy], str] = {
    Knorm: _OF_TOKENS,
    KeyDiff: _OF_TOKENS,
    StreamingLLM: _OF_TOKENS,
    ExpectedAttention: _OF_GROUP,
    SnapKV: _OF_GROUP,
    H2O: _OF_GROUP,
    TOVA: _OF_LAYER,
    Random: _OF_INDEX,
}


@dataclass
class HeadShard:
    """What a rank of a tensor-parallel mesh holds of an attention layer's heads.

    Query heads are dealt in order, as many to every rank. So are ``num_kv_heads`` key/value heads where they are at
    least as many as the ranks; where they are fewer, each is held by ``replicas`` neighboring ranks, which share its
    query heads. Latents of low-rank attention are one key/value head that all ranks hold.

    Args:
        mesh: of one dim.
        num_heads, num_kv_heads: of the whole layer.

    Raises:
        ValueError: heads that do not divide among the ranks; the same on every rank.
    """

    mesh: DeviceMesh
    num_heads: int
    num_kv_heads: int

    def __post_init__(self) -> None:
        ranks = self.mesh.size()
        if self.num_heads % ranks:
            raise ValueError(f"num_heads must be a multiple of the mesh's {ranks} ranks, got {self.num_heads}")
        if self.num_kv_heads % ranks and ranks % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must be a multiple or a divisor of the mesh's {ranks} ranks, got {self.num_kv_heads}"
            )

    @property
    def local_heads(self) -> int:
        """Query heads of a rank."""
        return self.num_heads // self.mesh.size()

    @property
    def local_kv_heads(self) -> int:
        """Key/value heads of a rank."""
        return max(1, self.num_kv_heads // self.mesh.size())

    @property
    def replicas(self) -> int:
        """Ranks that hold the same key/value head."""
        return max(1, self.mesh.size() // self.num_kv_heads)

    @property
    def first_kv_head(self) -> int:
        """Index of the rank's first key/value head among the layer's."""
        return self.mesh.get_local_rank() * self.num_kv_heads // self.mesh.size()

    @cached_property
    def replica_mesh(self) -> DeviceMesh:
        """The mesh as ``[key/value heads, replicas]``; made once, by all ranks together."""
        return replica_mesh(self.mesh, self.num_kv_heads)

    def enter(self, new: Projected, absorb: bool) -> Projected:
        """The projections of a call with gradients, where they enter what each rank computes for its heads alone.

        Backward, the ranks' gradients of what they share are summed. Expanded, the up-projection sums the latent's.
        """
        latent = _summed_backward(new.latent, self.mesh) if absorb else new.latent
        return new._replace(latent=latent, rope_key=_summed_backward(new.rope_key, self.mesh))

    def adapt(self, policy: Policy) -> Policy:
        """``policy`` for a cache that holds this rank's heads: it keeps what one process with all heads keeps.

        A policy of your own says what its scores depend on by an attribute ``depends_on``: ``"tokens"`` (of the head),
        ``"group"`` (also the head's queries, by a mean over them), ``"layer"`` (all heads, by a mean over them).

        Raises:
            ValueError: a policy of which that is not known.
        """
        inner = policy
        while isinstance(inner, Protect):
            inner = inner.policy
        dependence = getattr(inner, "depends_on", None) or _DEPENDENCE.get(type(inner))
        if dependence not in (_OF_TOKENS, _OF_GROUP, _OF_LAYER, _OF_INDEX):
            raise ValueError(
                f"policy must say what its scores depend on where heads are spread over ranks, got {policy!r}: give "
                f"{type(inner).__name__} an attribute depends_on = 'tokens', 'group' or 'layer' (HeadShard.adapt)"
            )
        if self.mesh.size() == 1 or dependence == _OF_TOKENS:
            return policy
        if dependence == _OF_GROUP and self.replicas == 1:
            return policy
        if dependence == _OF_INDEX and self.first_kv_head == 0 and self.mesh.size() > 1 and self.num_kv_heads == 1:
            return policy
        return ShardedHeads(policy, self, dependence)

    def mean_over_ranks(self, scores: Tensor, dependence: str) -> Tensor:
        """The mean of what the ranks that share a head, or all ranks, have: the same bits on each."""
        group: Any = self.mesh
        count = self.mesh.size()
        if dependence == _OF_GROUP and self.replicas != count:
            group, count = (self.replica_mesh, 1), self.replicas
        return collectives.all_reduce(scores.contiguous(), "sum", group) / count


def replica_mesh(mesh: DeviceMesh, num_kv_heads: int) -> DeviceMesh:
    """A one-dim mesh as ``[num_kv_heads, ranks / num_kv_heads]``: the second dim has the ranks that share a head."""
    shape = (num_kv_heads, mesh.size() // num_kv_heads)
    return DeviceMesh(mesh.device_type, mesh.mesh.view(shape), mesh_dim_names=("kv_heads", "replicas"))


def _summed_backward(shared: Tensor, mesh: DeviceMesh) -> Tensor:
    from torch.distributed.tensor import DTensor, Partial, Replicate

    whole = DTensor.from_local(shared, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


class ShardedHeads(Policy):
    """Another policy, over a rank's share of the heads.

    Args:
        policy: gives the scores of the rank's heads.
        shard: which heads those are.
        dependence: what a score depends on.
    """

    def __init__(self, policy: Policy, shard: HeadShard, dependence: str) -> None:
        self.policy, self._shard, self._dependence = policy, shard, dependence

    @property
    def query_window(self) -> int:  # type: ignore[override]
        """The inner policy's."""
        return self.policy.query_window

    @property
    def needs_rotary(self) -> bool:  # type: ignore[override]
        """The inner policy's."""
        return self.policy.needs_rotary

    @property
    def predicated(self) -> bool:  # type: ignore[override]
        """The inner policy's, but where ranks must talk: then a branch keeps them silent while nothing is due."""
        return self.policy.predicated and self._dependence == _OF_INDEX

    @property
    def rerotate(self) -> bool:  # type: ignore[override]
        """The inner policy's."""
        return self.policy.rerotate

    @property
    def slot_state(self) -> Mapping[str, torch.dtype]:  # type: ignore[override]
        """The inner policy's."""
        return self.policy.slot_state

    def always_kept(self, budget: int) -> tuple[int, int]:
        return self.policy.always_kept(budget)

    def check(self, budget: int) -> None:
        self.policy.check(budget)

    def observe(self, state: CacheState, query: Tensor) -> None:
        self.policy.observe(state, query)

    def score(self, state: CacheState) -> Tensor:
        if self._dependence == _OF_INDEX:
            state.first_head = self._shard.first_kv_head
            return self.policy.score(state)
        return self._shard.mean_over_ranks(self.policy.score(state), self._dependence)
