"""What a policy is: the base class, and what it sees of a cache when it scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fastattn.modules.rotary import Rotary


@dataclass
class QueryWindow:
    """Query vectors as attention took them (rotated), with what is needed to undo the rotation.

    Attributes:
        rotated: ``[B, H, N, D]``.
        positions: int32 ``[B, N]``, -1 where there is no query.
    """

    rotated: Tensor
    positions: Tensor

    @property
    def valid(self) -> Tensor:
        """bool ``[B, N]``."""
        return self.positions >= 0


class Stored(NamedTuple):
    """Keys and values as a layer holds them: numbers, or codes with their scales.

    Attributes:
        keys: ``[B, Hkv, C, D]``, or codes.
        values: ``[B, Hkv, C, Dv]``, or codes; of a latent, whose value is part of the key, those of the whole.
        key_scale: what :func:`fastattn.ops.score_knorm` and others take as ``key_scale``; None where keys are numbers.
        value_scale: likewise.
        value_dim: with codes, how many numbers a value has.
    """

    keys: Tensor
    values: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    value_dim: int | None = None


@dataclass
class CacheState:
    """What a policy sees of one layer when it scores.

    Attributes:
        keys: ``[B, Hkv, C, D]`` as cached, after rotation. Slots beyond ``lengths`` may hold anything, NaN included.
        values: ``[B, Hkv, C, Dv]``.
        positions: int32 ``[B, Hkv, C]``, original positions of the tokens.
        lengths: int32 ``[B, Hkv]``, valid slots; they are a prefix, in time order.
        tokens_seen: int64 ``[B]``, real tokens fed to each row, this call's included.
        next_position: int64 ``[B]``, one past the row's last position; without meaning in a row that brought no real
            token to this call, which is not compressed.
        scale: the attention's softmax scale.
        rotary: the model's rotation, or None.
        min_length: only rows and heads with at least as many valid slots are about to be compressed.
        latent: the keys are latents ``[latent | rope key]``, the values their first columns.
        window: the newest ``query_window`` queries, in time order.
        call: the queries of this call where it brought more than ``max_step`` tokens (a prompt), else None; in
            :meth:`Policy.observe` always the queries of the call.
        layer: index of the layer.
        budget: tokens that the compression leaves.
        first_head: index of the first key/value head among the layer's, where ranks hold a part of them.
        slots: what the policy keeps per slot (:attr:`Policy.slot_state`), each ``[B, Hkv, C]``.

    Of a quantised cache ``keys`` and ``values`` are copies as numbers, made when they are first asked for. ``stored``
    is what the layer holds, which operators of :mod:`fastattn.ops` read as it is.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    lengths: Tensor
    tokens_seen: Tensor
    next_position: Tensor
    scale: float
    rotary: Rotary | None
    min_length: int
    latent: bool = False
    window: QueryWindow | None = None
    call: QueryWindow | None = None
    layer: int = 0
    budget: int = 0
    first_head: int = 0
    slots: dict[str, Tensor] = field(default_factory=dict)

    @property
    def valid(self) -> Tensor:
        """bool ``[B, Hkv, C]``: the slots that hold a token."""
        return torch.arange(self.positions.shape[2], device=self.positions.device) < self.lengths[..., None]

    @property
    def stored(self) -> Stored:
        """Keys and values for operators, without a copy."""
        return Stored(self.keys, self.values)

    @property
    def score_dtype(self) -> torch.dtype:
        """float32, float64 for a float64 cache: the dtype of scores."""
        return torch.float64 if self.keys.dtype == torch.float64 else torch.float32

    @property
    def queries(self) -> Tensor:
        """``[B, H, W, D]``: the newest ``query_window`` queries before rotation, in time order, right-aligned."""
        return self.before_rotation(self.newest_queries())

    @property
    def query_valid(self) -> Tensor:
        """bool ``[B, W]``: which of ``queries`` exist."""
        return self.newest_queries().valid

    def before_rotation(self, window: QueryWindow) -> Tensor:
        """The window's queries with the model's rotation undone, float32 (float64 for float64)."""
        wide = window.rotated if window.rotated.dtype == torch.float64 else window.rotated.float()
        if self.rotary is None:
            return wide
        return self.rotary.unrotate(wide, window.positions.clamp(min=0))

    def newest_queries(self) -> QueryWindow:
        """The newest ``query_window`` queries as attention took them.

        Raises:
            ValueError: the cache keeps none for this policy.
        """
        if self.window is None:
            raise ValueError("queries are kept only for a policy with query_window > 0, this one has 0")
        return self.window


class CodedState(CacheState):
    """:class:`CacheState` of a quantised layer."""

    def __init__(self, stored: Stored, numbers: Callable[[], tuple[Tensor, Tensor]], **others: Any) -> None:
        self._stored, self._numbers = stored, numbers
        self._found: tuple[Tensor, Tensor] | None = None
        self.window, self.call, self.latent, self.layer, self.budget, self.slots = None, None, False, 0, 0, {}
        for name, value in others.items():
            setattr(self, name, value)

    @property
    def keys(self) -> Tensor:  # type: ignore[override]
        """``[B, Hkv, C, D]`` as numbers."""
        return self._as_numbers()[0]

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        """``[B, Hkv, C, Dv]`` as numbers."""
        return self._as_numbers()[1]

    @property
    def stored(self) -> Stored:
        return self._stored

    @property
    def score_dtype(self) -> torch.dtype:
        return torch.float32

    def _as_numbers(self) -> tuple[Tensor, Tensor]:
        if self._found is None:
            self._found = self._numbers()
        return self._found


class Policy(ABC):
    """Base class of all policies. A policy of your own is one method in plain PyTorch.

    Its argument is a :class:`fastattn.modules.policies.CacheState`: keys, values, positions, lengths and, where asked
    for, the newest queries of one layer.

    .. code-block:: python

        class NewestAndLargest(Policy):
            def score(self, state):
                size = state.values.float().norm(dim=-1)
                newest = state.positions >= state.next_position[:, None, None] - 16
                return size.masked_fill(newest, float("inf"))

    Attributes:
        query_window: how many of the newest queries the cache keeps for the policy; 0 keeps none.
        needs_rotary: the policy looks ahead and cannot work without the model's :class:`Rotary`.
        predicated: on a step that compresses nothing the score costs a device next to nothing, because its work is in
            operators that take ``state.min_length``.
        rerotate: attention sees keys and queries rotated to their index in the cache (StreamingLLM's own variant).
        slot_state: numbers that the policy keeps per slot, as in ``{"mass": torch.float32}``: buffers ``[B, Hkv, C]``,
            zero for a new token, which move with their tokens through everything that happens to a cache.
            ``torch.float32`` becomes float64 in a float64 cache. :meth:`observe` fills, ``state.slots`` shows them.
    """

    query_window: int = 0
    needs_rotary: ClassVar[bool] = False
    predicated: ClassVar[bool] = False
    rerotate: bool = False
    slot_state: Mapping[str, torch.dtype] = MappingProxyType({})

    @abstractmethod
    def score(self, state: CacheState) -> Tensor:
        """Scores ``[B, Hkv, C]``, float32 (float64 for a float64 cache): higher is kept.

        Of equal scores the newer token is kept; NaN ranks lowest; slots beyond ``state.lengths`` are ignored. To be
        compiled into the decode step it must be traceable: no Python branch on tensor values.

        It may call the score of another policy. ``query_window`` and ``needs_rotary`` must then cover that one's,
        sinks and recent tokens have a score of +inf, and scores of rows that are not compressed are unspecified.

        Args:
            state: one layer of the cache, the call's new tokens included.
        """

    def observe(self, state: CacheState, query: Tensor) -> None:  # noqa: B027 - most policies keep nothing per slot
        """Bring ``state.slots`` up to date, in place or by new tensors in the dictionary.

        Called once per layer and call where the policy has :attr:`slot_state`, once the call's tokens are in the cache
        and before they are compressed. It must be traceable, as :meth:`score` must. What cropped queries have
        added stays: cropping takes back tokens, not what was observed.

        Args:
            state: one layer of the cache, the call's new tokens included. ``state.call.positions`` says which queries
                are real: padding has position -1 and may hold anything.
            query: ``[B, H, T, Dk]``, the new queries as attention took them.
        """

    def always_kept(self, budget: int) -> tuple[int, int]:
        """How many first and newest tokens the policy keeps whatever the scores say."""
        return 0, 0

    def check(self, budget: int) -> None:  # noqa: B027 - most policies work with any budget
        """Raise ``ValueError`` where the policy cannot work with ``budget`` tokens; called when a cache is made."""

    def __repr__(self) -> str:
        # A policy may be an nn.Module too, whose bookkeeping is none of its options.
        shown = {name: value for name, value in vars(self).items() if name != "training" and not name.startswith("_")}
        options = ", ".join(f"{name}={value!r}" for name, value in sorted(shown.items()))
        return f"{type(self).__name__}({options})"
