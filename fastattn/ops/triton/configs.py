"""Tile sizes, warps and pipeline stages: a small table by chip family and shape class, and what proves it.

No autotuning: a config is looked up. ``benchmarks.kernel_table`` compiles every line for its chip without a GPU and
holds it to the chip's shared memory, to no spilled registers and to the chip's matrix instructions.

Each kernel module lists what to compile in a function ``offline_cases() -> list[OfflineCase]``, and
``KERNEL_MODULES`` names the modules. A case calls the module's own launcher on meta tensors; the launches are recorded,
not run, so what is compiled is what would be launched. ``benchmarks/lib/offline.py`` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FAMILIES = ("sm_80", "sm_86", "sm_90", "sm_100", "gfx942")

# Modules of fastattn.ops.triton that define offline_cases(), in the order of the table.
KERNEL_MODULES = (
    "attention",
    "attention_backward",
    "decode",
    "latent",
    "codes",
    "merge",
    "qk",
    "scores",
    "expected_attention",
    "moments",
    "cache",
    "append_codes",
)


@dataclass(frozen=True)
class Config:
    """A tile and how it is launched.

    Attributes:
        rows: rows of the left operand of the matrix products (queries times heads of a group).
        keys: keys of a tile.
        warps: warps per program.
        stages: depth of the load pipeline.
    """

    rows: int
    keys: int
    warps: int
    stages: int

    def options(self) -> dict[str, Any]:
        """Launch options, as keyword arguments."""
        return {"num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True)
class OfflineCase:
    """A call of a launcher whose kernels are to be compiled offline.

    Conventions the checks rely on: a constexpr ``BLOCK_M`` is the number of rows of a kernel's matrix products (64 rows
    must use wgmma on sm_90 and tcgen05 on sm_100); run-time arguments are tensors and integers, never floats.

    Attributes:
        name: operator and shape class, unique in the table: ``"decode_attention 128/128 G4"``.
        launch: calls the launcher, with all tensors on the meta device.
        families: chip families to compile for.
        narrow: kernels that rightly have no 16-byte load, by name.
    """

    name: str
    launch: Callable[[], object]
    families: tuple[str, ...] = FAMILIES
    narrow: tuple[str, ...] = ()


@dataclass(frozen=True)
class SplitConfig(Config):
    """A config of a split-KV kernel.

    Attributes:
        resident: programs that one processor holds at a time (by shared memory), which the split count follows.
    """

    resident: int


def decode_config(family: str, rows: int, slot_bytes: int, itemsize: int) -> SplitConfig:
    """The tile of ``decode_attention`` for ``rows`` (queries times group) and ``slot_bytes`` (key and value of a slot).

    Decoding reads every slot once and computes little, so the tile is chosen to keep many bytes in flight: about
    ``keys * stages * slot_bytes`` of shared memory per program. More rows than needed cost nothing but registers.
    """
    lines: tuple[tuple[int, ...], ...] = _DECODE[family]
    if itemsize == 4:
        lines = _DECODE_FLOAT32["gfx942" if family == "gfx942" else "nvidia"]
    for largest, most_rows, keys, warps, stages, resident in lines:
        if slot_bytes <= largest:
            block = 16 if rows <= 16 else 32 if rows <= 32 else 64
            return SplitConfig(min(block, most_rows), keys, warps, stages, resident)
    raise ValueError(f"decode_attention supports up to {lines[-1][0]} bytes per slot, got {slot_bytes}")


# (largest bytes per slot, most rows, keys, warps, stages, programs per processor).
# 256 = 64/64, 512 = 128/128, 640 = 192/128, 1,024 = 256/256, 2,048 = 512/512.
# Rows are limited where the accumulator (rows * value dim numbers) spills.
_DECODE = {
    # 227 KiB per block: two programs of about 100 KiB overlap one's start with the other's loads
    "sm_90": ((256, 64, 128, 4, 3, 2), (512, 64, 64, 4, 3, 2), (1024, 64, 32, 4, 3, 2), (2048, 32, 32, 8, 3, 1)),
    "sm_100": ((256, 64, 128, 4, 3, 2), (512, 64, 64, 4, 3, 2), (1024, 64, 32, 4, 3, 2), (2048, 32, 32, 8, 2, 1)),
    # 163 KiB: two programs of 64 to 80 KiB
    "sm_80": ((256, 64, 128, 4, 2, 2), (512, 64, 64, 4, 2, 2), (1024, 32, 32, 4, 2, 2), (2048, 32, 16, 8, 2, 2)),
    # 99 KiB: one program of 64 KiB
    "sm_86": ((256, 64, 128, 4, 2, 1), (512, 64, 64, 4, 2, 1), (1024, 32, 32, 4, 2, 1), (2048, 32, 16, 8, 2, 1)),
    # 64 KiB, one stage: the compiler keeps the next tile in registers instead
    "gfx942": ((256, 64, 64, 4, 1, 2), (512, 64, 32, 4, 1, 2), (1024, 32, 32, 4, 1, 1), (2048, 16, 16, 4, 1, 1)),
}
# Without a matrix unit each thread holds whole operand rows: eight warps and few keys, or they spill.
_DECODE_FLOAT32 = {
    "nvidia": ((1024, 16, 32, 8, 2, 2), (2048, 16, 16, 8, 2, 2), (4096, 16, 16, 8, 1, 1)),
    "gfx942": ((1024, 16, 32, 4, 1, 2), (2048, 16, 16, 4, 1, 1), (4096, 16, 16, 4, 1, 1)),
}


def latent_config(family: str, rows: int, rank: int, rope: int, itemsize: int) -> SplitConfig:
    """The tile of ``latent_decode`` for ``rows`` (queries times heads); rank and rope dim rounded up to powers of two.

    One latent tile serves every row, so more rows per tile mean more work per byte; the accumulator
    (``rows * rank`` numbers in registers) limits them.
    """
    if itemsize == 4:
        size = "float32"
    elif rank > 256:
        size = "rank 512" if rope <= 64 else "rank 512, rope 128"
    else:
        size = "rank 256"
    return next(SplitConfig(*tile) for most_rows, *tile in _LATENT[family][size] if rows <= most_rows)


_MANY = 1 << 30
# (most rows, rows of a tile, keys, warps, stages, programs per processor). A tile takes about
# (rows + stages * keys) * 1,152 bytes at 512 + 64 columns in 16 bits. Float32 has no matrix unit that rounds as IEEE
# asks: small tiles.
_LATENT = {
    # 64 x 64 is the largest tile whose accumulator stays in registers: 221,184 bytes, warp-group products, of which
    # both groups compute the one by keys. With 4 warps the query is loaded half as often, and two programs share a
    # processor
    "sm_90": {
        "rank 512": ((16, 16, 32, 4, 3, 2), (32, 32, 32, 4, 3, 2), (_MANY, 64, 64, 8, 2, 1)),
        "rank 512, rope 128": ((16, 16, 32, 4, 3, 2), (_MANY, 32, 32, 8, 3, 1)),  # 64 rows spill
        "rank 256": (
            (16, 16, 64, 4, 3, 2),
            (32, 32, 64, 4, 3, 2),
            (64, 64, 64, 4, 3, 1),
            (_MANY, 128, 64, 8, 3, 1),
        ),
        "float32": ((_MANY, 16, 32, 8, 1, 1),),
    },
    # tcgen05 keeps copies of the operands in shared memory: half the keys
    "sm_100": {
        "rank 512": ((16, 16, 32, 4, 3, 2), (32, 32, 32, 8, 3, 1), (_MANY, 64, 32, 8, 2, 1)),
        "rank 512, rope 128": ((16, 16, 32, 4, 3, 2), (32, 32, 32, 8, 3, 1), (_MANY, 64, 32, 8, 2, 1)),
        "rank 256": ((16, 16, 64, 4, 3, 2), (32, 32, 64, 4, 3, 2), (_MANY, 64, 64, 4, 2, 1)),
        "float32": ((_MANY, 16, 32, 8, 1, 1),),
    },
    # 64 x 32 is the largest tile without spills, with a rope dim of 128 no longer
    "sm_80": {
        "rank 512": ((16, 16, 32, 4, 2, 2), (32, 32, 32, 8, 2, 1), (_MANY, 64, 32, 8, 2, 1)),
        "rank 512, rope 128": ((16, 16, 32, 4, 2, 2), (_MANY, 32, 32, 8, 2, 1)),
        "rank 256": ((16, 16, 64, 4, 2, 2), (32, 32, 64, 4, 2, 2), (_MANY, 64, 32, 4, 2, 2)),
        "float32": ((_MANY, 16, 32, 8, 1, 1),),
    },
    # 99 KiB: 32 rows
    "sm_86": {
        "rank 512": ((16, 16, 32, 4, 2, 1), (_MANY, 32, 32, 8, 2, 1)),
        "rank 512, rope 128": ((16, 16, 32, 4, 2, 1), (_MANY, 32, 32, 8, 2, 1)),
        "rank 256": ((16, 16, 64, 4, 2, 1), (32, 32, 64, 4, 2, 1), (_MANY, 64, 32, 4, 2, 1)),
        "float32": ((_MANY, 16, 16, 8, 1, 1),),
    },
    # 64 KiB, one stage, four warps: with eight the tile no longer fits the registers of a wave
    "gfx942": {
        "rank 512": ((16, 16, 32, 4, 1, 1), (_MANY, 32, 32, 4, 1, 1)),
        "rank 512, rope 128": ((_MANY, 16, 32, 4, 1, 1),),
        "rank 256": ((16, 16, 32, 4, 1, 2), (_MANY, 32, 32, 4, 1, 2)),
        "float32": ((_MANY, 16, 16, 4, 1, 1),),
    },
}


def codes_config(family: str, rows: int, numbers: int, itemsize: int, latent: bool, int4: bool) -> SplitConfig:
    """The tile of attention over codes, for ``numbers`` of a slot, key and value, and a query of ``itemsize`` bytes.

    As for a cache of the query's dtype, which codes are turned into, where the conversion leaves room for that: with
    latents it does not, nor where products take no matrix unit.
    """
    if latent or itemsize == 4:
        warps, stages = (4, 1) if family == "gfx942" else (8, 2)
        few = rows <= 16 or itemsize == 4
        keys = 32 if few and itemsize < 4 else 16
        return SplitConfig(16 if few else 32, keys, warps, stages, 2 if few else 1)
    if int4 and family in ("sm_80", "sm_86"):  # two operands per byte and two accumulators: 64 rows spill
        rows = min(rows, 32)
    return decode_config(family, rows, numbers * itemsize, itemsize)


def attention_config(family: str, rows: int, columns: int, itemsize: int, features: bool = False) -> Config:
    """The forward tile of ``attention`` for ``rows`` (queries times group) and the wider of the two head dims.

    ``features``: windows, caps, slopes or packed rows take registers that large tiles on older chips have not.
    """
    if itemsize == 4:
        return Config(*_ATTENTION_FLOAT32["gfx942" if family == "gfx942" else "nvidia"][columns > 128])
    older = features and family in ("sm_80", "sm_86")
    if older and columns > 192:
        return Config(32, 32, 4, 2)
    few = rows <= 64 or older
    for largest, many_rows, few_rows in _ATTENTION[family]:
        if columns <= largest:
            return Config(*(few_rows if few else many_rows))
    raise ValueError(f"attention supports up to {_ATTENTION[family][-1][0]} columns, got {columns}")


# (largest head dim, tile for many rows, tile for at most 64 rows); a tile is (rows, keys, warps, stages).
# 128 rows give a matrix unit two times 64; more keys per tile amortize the softmax, until shared memory is full.
_ATTENTION = {
    # at 128/128, 128 keys spill; with two stages no load is under way while a tile is multiplied
    "sm_90": (
        (64, (128, 128, 8, 3), (64, 128, 4, 3)),
        (128, (128, 64, 8, 3), (64, 64, 4, 3)),
        (192, (128, 64, 8, 3), (64, 64, 4, 3)),
        (256, (128, 32, 8, 3), (64, 32, 4, 3)),
    ),
    "sm_100": (
        (64, (128, 64, 8, 3), (64, 64, 4, 3)),
        (128, (128, 64, 8, 2), (64, 64, 4, 2)),
        (192, (128, 64, 8, 2), (64, 32, 4, 2)),
        (256, (128, 32, 8, 2), (64, 32, 4, 2)),
    ),
    # operands of the matrix unit sit in registers: 64 rows from 256 columns on
    "sm_80": (
        (64, (128, 64, 4, 3), (64, 32, 4, 3)),
        (128, (128, 64, 8, 2), (64, 32, 4, 2)),
        (192, (128, 32, 8, 2), (64, 32, 4, 2)),
        (256, (64, 32, 8, 2), (64, 32, 8, 2)),
    ),
    "sm_86": (
        (64, (128, 32, 4, 3), (64, 32, 4, 3)),
        (128, (128, 32, 8, 2), (64, 32, 4, 2)),
        (192, (128, 32, 8, 2), (64, 32, 4, 2)),
        (256, (64, 32, 8, 2), (64, 32, 8, 2)),
    ),
    "gfx942": (
        (64, (128, 64, 4, 1), (64, 64, 4, 1)),
        (128, (128, 64, 4, 1), (64, 64, 4, 1)),
        (192, (64, 32, 4, 1), (64, 32, 4, 1)),
        (256, (64, 32, 4, 1), (64, 32, 4, 1)),
    ),
}
# Dots with IEEE rounding run on the ordinary units, operands and accumulator in registers: (up to 128 columns, above).
_ATTENTION_FLOAT32 = {
    "nvidia": ((32, 32, 8, 1), (16, 32, 8, 1)),
    "gfx942": ((32, 16, 4, 1), (16, 16, 4, 1)),
}


def backward_configs(family: str, columns: int, itemsize: int, features: bool = False) -> tuple[Config, Config]:
    """The tiles of attention's gradient by keys and by queries: a program owns ``rows`` and loops over ``keys``.

    ``features``: windows, caps, slopes or packed rows take registers that the tile by keys hasn't left.
    """
    if itemsize == 4:
        tile = Config(16, 16, 4 if family == "gfx942" else 8, 1)  # larger ones spill kilobytes
        return tile, tile
    for largest, by_keys, by_queries in _BACKWARD[family]:
        if columns <= largest:
            rows, keys, warps, stages = by_keys
            if features and columns <= 128 and family in ("sm_80", "sm_90"):
                keys //= 2
            return Config(rows, keys, warps, stages), Config(*by_queries)
    raise ValueError(f"attention supports up to {_BACKWARD[family][-1][0]} columns, got {columns}")


# (largest head dim, tile by keys, tile by queries). Two accumulators and five products: smaller tiles than forward.
_BACKWARD: dict[str, tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]] = {
    # two warp groups (8 warps) want 128 rows: over 64, both compute all of a product that another product follows
    "sm_90": (
        (64, (64, 64, 4, 3), (64, 64, 4, 3)),
        (128, (128, 32, 8, 3), (128, 64, 8, 3)),
        (192, (128, 16, 8, 3), (128, 32, 8, 3)),
        (256, (64, 32, 8, 3), (128, 32, 8, 3)),  # by keys, 128 rows spill a kilobyte
    ),
    "sm_100": (
        (64, (64, 64, 4, 2), (64, 64, 4, 2)),
        (128, (64, 32, 8, 2), (64, 32, 8, 2)),
        (192, (64, 32, 8, 1), (64, 32, 8, 1)),
        (256, (64, 32, 8, 1), (64, 32, 8, 1)),
    ),
    # four warps where they don't spill: eight compute part of the products twice, and leave room for one program
    "sm_80": (
        (64, (64, 64, 4, 2), (64, 64, 4, 2)),
        (128, (64, 32, 4, 2), (64, 32, 4, 2)),
        (192, (32, 32, 4, 1), (32, 32, 4, 1)),
        (256, (32, 32, 8, 1), (32, 32, 4, 1)),
    ),
    "sm_86": (
        (64, (64, 32, 4, 2), (64, 32, 4, 2)),
        (128, (64, 32, 8, 2), (64, 32, 4, 2)),
        (192, (32, 32, 4, 1), (32, 32, 4, 1)),
        (256, (32, 32, 8, 1), (32, 32, 4, 1)),
    ),
    "gfx942": (
        (64, (64, 32, 4, 1), (64, 32, 4, 1)),
        (128, (32, 32, 4, 1), (32, 32, 4, 1)),
        (192, (32, 16, 4, 1), (32, 16, 4, 1)),
        (256, (32, 16, 4, 1), (32, 16, 4, 1)),
    ),
}


def qk_config(family: str, rows: int, itemsize: int) -> Config:
    """The tile of ``qk_scores`` for ``rows`` (queries times group): a matrix product whose result is what costs."""
    if itemsize == 4:
        return Config(32, 64, 4, 1)
    return Config(16, 128, 4, 2) if rows <= 16 else Config(*_QK[family])


_QK = {
    "sm_90": (128, 128, 8, 3),
    "sm_100": (128, 128, 8, 3),
    "sm_80": (128, 128, 8, 3),
    "sm_86": (128, 64, 4, 3),
    "gfx942": (128, 128, 8, 1),
}
