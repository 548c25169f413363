"""What a cache is made for: sizes, policy and dtype, checked once, and what follows from them for every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, fields, replace
from typing import Any

import torch

from fastattn.modules.policies import Policy
from fastattn.modules.rotary import Rotary
from fastattn.ops.quantize import check_dim, check_storage
from fastattn.validation import FLOATS, check_count


@dataclass(frozen=True)
class LayerSpec:
    """What one layer holds. Whatever may differ between layers belongs here.

    Attributes:
        budget: tokens that a compression leaves.
        interval: decode steps between two compressions.
        max_step: most tokens of a call that counts as a decode step.
        num_kv_heads: key/value heads.
        head_dim: dims of a key.
        v_head_dim: dims of a value.
        latent_rank: the value is the key's first ``latent_rank`` dims; None where it is stored by itself.
        slot_state: names and dtypes of the numbers that the policy keeps per slot.
        storage: the format of quantised keys and values, None where they are stored as they come.
        window: positions that a query sees, its own included. Such a layer keeps its newest ``window`` tokens, whatever
            the policy says; None where the policy chooses.
    """

    budget: int
    interval: int
    max_step: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    latent_rank: int | None
    slot_state: tuple[tuple[str, torch.dtype], ...] = ()
    storage: str | None = None
    window: int | None = None

    @property
    def capacity(self) -> int:
        """Slots per row and head."""
        return self.full_length + self.max_step - 1

    @property
    def full_length(self) -> int:
        """A decode step begins by compressing rows and heads with as many tokens."""
        return self.budget + self.interval

    @property
    def stored_value_dim(self) -> int:
        """Width of the value buffer."""
        return self.v_head_dim if self.latent_rank is None else 0


@dataclass(frozen=True)
class CacheSpec:
    """The arguments of :class:`CompressedKVCache`, which documents them.

    Raises:
        TypeError, ValueError: an argument of another type or range, or a budget that the policy cannot work with.
    """

    policy: Policy
    budget: int | Sequence[int]
    num_layers: int
    num_kv_heads: int
    head_dim: int | Sequence[int]
    v_head_dim: int | Sequence[int] | None = None
    latent_rank: int | Sequence[int] | None = None
    num_heads: int | None = None
    batch_size: int = 1
    interval: int = 128
    max_step: int = 1
    dtype: torch.dtype | None = None
    storage: str | None = None
    window: int | Sequence[int | None] | None = None
    # Checked here, but kept by the cache: it moves with the buffers.
    rotary: InitVar[Rotary | Sequence[Rotary | None] | None] = None

    def __post_init__(self, rotary: Rotary | Sequence[Rotary | None] | None) -> None:
        for name in ("num_layers", "num_kv_heads", "batch_size", "interval", "max_step"):
            check_count(name, getattr(self, name), 1)
        object.__setattr__(self, "budget", checked_counts("budget", self.budget, self.num_layers))
        for name in ("head_dim", "v_head_dim", "latent_rank"):
            if name == "head_dim" or getattr(self, name) is not None:
                counts = checked_counts(name, getattr(self, name), self.num_layers)
                object.__setattr__(self, name, counts if isinstance(counts, int) else one_or_each(counts))
        object.__setattr__(self, "window", checked_window(self.window, self.num_layers))
        check_count("policy.query_window", self.policy.query_window, 0)
        self._check_slot_state()
        self._check_widths()
        self._check_rotary(rotary)
        if self.dtype is not None and self.dtype not in FLOATS:
            raise TypeError(f"dtype must be torch.float16, bfloat16, float32 or float64, got {self.dtype!r}")
        if self.storage is not None:
            self._check_storage(self.storage)
        if self.num_heads is not None:
            check_count("num_heads", self.num_heads, 1)
            if self.num_heads % self.num_kv_heads:
                raise ValueError(
                    f"num_heads must be a multiple of num_kv_heads {self.num_kv_heads}, got {self.num_heads}"
                )
        chosen = {budget for budget, window in zip(self.budgets, self.windows, strict=True) if window is None}
        for budget in sorted(chosen):
            self.policy.check(budget)

    def _check_storage(self, storage: str) -> None:
        """A format that takes keys and values of these dims, and a policy that works over codes."""
        check_storage(storage)
        for key_dim in dict.fromkeys(self.head_dims):
            check_dim("keys", key_dim, storage)
        for value_dim in dict.fromkeys(self.value_dims) if self.latent_rank is None else ():
            check_dim("values", value_dim, storage)
        if (self.dtype or torch.get_default_dtype()) == torch.float64:
            raise ValueError(f"storage must be None for a cache of dtype torch.float64, got {storage!r}")
        if self.policy.rerotate:
            raise ValueError(
                f"storage must be None for {type(self.policy).__name__}(rerotate=True), which rotates all keys anew, "
                f"got {storage!r}"
            )

    def _check_slot_state(self) -> None:
        """Names and dtypes of what the policy keeps per slot."""
        declared: object = self.policy.slot_state
        if not isinstance(declared, Mapping):
            raise TypeError(f"policy.slot_state must map names to dtypes, got {type(declared).__name__}")
        for name, dtype in declared.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise ValueError(f"policy.slot_state must have names that are identifiers, got {name!r}")
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"policy.slot_state[{name!r}] must be a torch.dtype, got {type(dtype).__name__}")

    def _check_widths(self) -> None:
        """Dims of keys, values and latents fit together."""
        if self.latent_rank is None:
            return
        if self.num_kv_heads != 1:
            raise ValueError(f"num_kv_heads must be 1 for a latent cache, got {self.num_kv_heads}")
        if any(rank > dim for rank, dim in zip(self.latent_ranks, self.head_dims, strict=True) if rank is not None):
            raise ValueError(f"latent_rank must be at most head_dim {self.head_dim}, got {self.latent_rank}")
        if self.v_head_dim not in (None, self.latent_rank):
            raise ValueError(f"v_head_dim must be latent_rank {self.latent_rank} or None, got {self.v_head_dim}")

    def _check_rotary(self, rotary: Rotary | Sequence[Rotary | None] | None) -> None:
        """A rotation where the policy needs one, of dims that a key has."""
        policy = self.policy
        if rotary is None and (policy.needs_rotary or policy.rerotate):
            raise ValueError(f"rotary must be given: {type(policy).__name__} needs the model's rotation, got None")
        if isinstance(rotary, (list, tuple)) and len(rotary) != self.num_layers:
            raise ValueError(
                f"rotary must be one rotation, or one or None for each of the {self.num_layers} layers, got "
                f"{len(rotary)}"
            )
        each = rotary if isinstance(rotary, (list, tuple)) else (rotary,) * self.num_layers
        for one, head_dim in zip(each, self.head_dims, strict=True):
            if one is not None and not isinstance(one, Rotary):
                raise TypeError(f"rotary must be a Rotary, a list of them or None, got {type(one).__name__}")
            if one is not None and one.end > head_dim:
                raise ValueError(f"rotary must rotate dims within head_dim {head_dim}, got dims up to {one.end}")

    @property
    def budgets(self) -> tuple[int, ...]:
        """The budget of every layer."""
        return self._each(self.budget)

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Dims of every layer's keys."""
        return self._each(self.head_dim)

    @property
    def latent_ranks(self) -> tuple[int | None, ...]:
        """The latent rank of every layer."""
        return (None,) * self.num_layers if self.latent_rank is None else self._each(self.latent_rank)

    @property
    def value_dims(self) -> tuple[int, ...]:
        """Dims of every layer's values."""
        return self._each(next(d for d in (self.latent_rank, self.v_head_dim, self.head_dim) if d is not None))

    def _each(self, given: int | Sequence[int]) -> tuple[int, ...]:
        return (given,) * self.num_layers if isinstance(given, int) else tuple(given)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of every layer, None where a query sees all."""
        return tuple(self.window) if isinstance(self.window, tuple) else (None,) * self.num_layers

    @property
    def ring_size(self) -> int:
        """Queries that the ring of newest queries holds, 0 where the policy looks at none.

        It is ``max_step`` longer than the policy's window, so that a decode step that fails has overwritten nothing of
        the window.
        """
        return self.policy.query_window + self.max_step if self.policy.query_window else 0

    @property
    def budgets_differ(self) -> bool:
        """Some layers are compressed when others are not."""
        kept = {window or budget for budget, window in zip(self.budgets, self.windows, strict=True)}
        return len(kept) > 1

    @property
    def needs_queries(self) -> bool:
        """The policy looks at queries."""
        return self.policy.query_window > 0 or bool(self.policy.slot_state)

    def layer(self, index: int) -> LayerSpec:
        """What layer ``index`` holds."""
        return LayerSpec(
            budget=self.windows[index] or self.budgets[index],
            interval=self.interval,
            max_step=self.max_step,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dims[index],
            v_head_dim=self.value_dims[index],
            latent_rank=self.latent_ranks[index],
            slot_state=() if self.windows[index] else tuple(self.policy.slot_state.items()),
            storage=self.storage,
            window=self.windows[index],
        )

    def with_num_heads(self, num_heads: int, rotary: Rotary | Sequence[Rotary | None] | None) -> CacheSpec:
        """This spec once the number of query heads is known."""
        return replace(self, num_heads=num_heads, rotary=rotary)

    def arguments(self, **changed: Any) -> dict[str, Any]:
        """Keyword arguments of a cache of this spec, some of them changed."""
        return {one.name: getattr(self, one.name) for one in fields(self)} | changed


def checked_counts(name: str, given: object, num_layers: int) -> int | tuple[int, ...]:
    """``given`` as one number for all layers, or as one for every layer.

    Raises:
        TypeError, ValueError: neither, naming the layer that is wrong.
    """
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        check_count(name, given, 1)
        return given  # type: ignore[return-value]
    if len(given) != num_layers:
        raise ValueError(f"{name} must be one number, or one for each of the {num_layers} layers, got {len(given)}")
    for layer, count in enumerate(given):
        check_count(f"{name}[{layer}]", count, 1)
    return tuple(given)


def one_or_each(counts: Sequence[int]) -> int | tuple[int, ...]:
    """The number that all layers share, or every layer's."""
    return counts[0] if len(set(counts)) == 1 else tuple(counts)


def checked_window(window: object, num_layers: int) -> tuple[int | None, ...] | None:
    """``window`` as one number or None for every layer; None where no layer has one.

    Raises:
        TypeError, ValueError: not a number of at least 1, or not one for every layer.
    """
    if window is None:
        return None
    if isinstance(window, (str, bytes)) or not isinstance(window, Sequence):
        check_count("window", window, 1)
        return (window,) * num_layers  # type: ignore[return-value]
    if len(window) != num_layers:
        raise ValueError(
            f"window must be one number, or one or None for each of the {num_layers} layers, got {len(window)}"
        )
    for layer, positions in enumerate(window):
        if positions is not None:
            check_count(f"window[{layer}]", positions, 1)
    return tuple(window) if any(window) else None
