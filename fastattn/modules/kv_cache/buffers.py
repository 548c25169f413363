"""The buffers of a cache, declared once: allocating, resetting, cropping, reordering and saving follow this list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastattn.modules.kv_cache.spec import LayerSpec
from fastattn.ops._formats import GROUP, code_dtype, code_width, scale_dtype


@dataclass(frozen=True)
class Buffer:
    """One tensor of the state.

    Attributes:
        name: its name in the module and in a saved state.
        dims: what each dim counts: ``rows`` of the batch, ``kv_heads``, ``slots`` of a head, ``heads`` of the query,
            ``ring`` (queries kept), ``key_dim``, ``value_dim``, and of quantised ones ``key_codes``, ``key_groups`` and
            so on.
        dtype: None for the dtype of keys and values; float32 becomes float64 in a float64 cache.
        empty: what it holds where there is no token. None where that may be anything: the buffer is then never cleared.
        late: allocated once the number of query heads is known.
    """

    name: str
    dims: tuple[str, ...]
    dtype: torch.dtype | None = None
    empty: int | None = None
    late: bool = False

    @property
    def per_row(self) -> bool:
        """The first dim is the batch."""
        return self.dims[:1] == ("rows",)

    @property
    def per_slot(self) -> bool:
        """Holds something for every slot ``[rows, kv_heads, slots, ...]``, and moves with the tokens."""
        return self.dims[:3] == ("rows", "kv_heads", "slots")

    def allocate(self, sizes: Mapping[str, int], dtype: torch.dtype, device: Any) -> Tensor:
        """The empty buffer."""
        shape = [sizes[dim] for dim in self.dims]
        return torch.full(shape, self.empty or 0, dtype=self.resolve_dtype(dtype), device=device)

    def resolve_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The buffer's dtype in a cache whose keys have ``dtype``."""
        if self.dtype is None or (self.dtype == torch.float32 and dtype == torch.float64):
            return dtype
        return self.dtype


# What all layers share. A leading underscore: no public name, but a name in saved states.
SHARED_BUFFERS = (
    Buffer("tokens_seen", ("rows",), torch.int64, empty=0),
    Buffer("columns", (), torch.int64, empty=0),
    # Newest columns that crop() may take back: real for every row, and no compression since they were appended.
    Buffer("_croppable", (), torch.int64, empty=0),
    # Newest real tokens of each row that crop() may take back.
    Buffer("_croppable_rows", ("rows",), torch.int64, empty=0),
    # Which query each place of the ring holds (QueryRing): its count in the row, and its position.
    Buffer("_query_index", ("rows", "ring"), torch.int64, empty=-1),
    Buffer("_query_positions", ("rows", "ring"), torch.int32, empty=-1),
)

_LAYER_BUFFERS = (
    Buffer("keys", ("rows", "kv_heads", "slots", "key_dim")),
    Buffer("values", ("rows", "kv_heads", "slots", "value_dim")),
    Buffer("positions", ("rows", "kv_heads", "slots"), torch.int32, empty=-1),
    Buffer("lengths", ("rows", "kv_heads"), torch.int32, empty=0),
    Buffer("queries", ("rows", "heads", "ring_and_spare", "key_dim"), late=True),
)


def layer_buffers(spec: LayerSpec) -> tuple[Buffer, ...]:
    """What a layer of ``spec`` holds. A further buffer, for all layers or for some, is declared here."""
    kept = [Buffer(slot_name(name), ("rows", "kv_heads", "slots"), dtype, empty=0) for name, dtype in spec.slot_state]
    if spec.storage is None:
        return (*_LAYER_BUFFERS, *kept)
    codes = (("keys", "key_codes"), ("values", "value_codes"))
    per_slot, groups = ("rows", "kv_heads", "slots"), spec.storage == "int4"
    quantised = [Buffer(name, (*per_slot, width), code_dtype(spec.storage)) for name, width in codes]
    for name in ("key",) if spec.latent_rank is not None else ("key", "value"):
        dims = (*per_slot, f"{name}_groups") if groups else per_slot
        quantised.append(Buffer(f"{name}_scale", dims, scale_dtype(spec.storage)))
    return (*quantised, *_LAYER_BUFFERS[2:], *kept)


def slot_name(name: str) -> str:
    """What the buffer of a policy's ``slot_state[name]`` is called: it can't meet a name of the cache's own."""
    return f"slot_{name}"


def layer_sizes(spec: LayerSpec, rows: int) -> dict[str, int]:
    """What the dims of a layer's buffers count."""
    return {
        "rows": rows,
        "kv_heads": spec.num_kv_heads,
        "slots": spec.capacity,
        "key_dim": spec.head_dim,
        "value_dim": spec.stored_value_dim,
        "key_codes": code_width(spec.storage or "", spec.head_dim),
        "value_codes": code_width(spec.storage or "", spec.stored_value_dim),
        "key_groups": spec.head_dim // GROUP,
        "value_groups": spec.stored_value_dim // GROUP,
    }
