"""In-place updates of a cache: appending new tokens and compacting a full buffer to its best slots."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastattn import validation as check
from fastattn.ops._plain import append_codes_is_plain, append_is_plain
from fastattn.ops._register import register
from fastattn.ops.quantize import check_codes, code_columns


def cache_append_(
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    lengths: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Append tokens behind the valid slots of every row and head, in place.

    A token whose position is -1 (padding, an inactive row) is not appended to that row; the others keep their order.

    Args:
        key_cache: ``[B, Hkv, C, Dk]``, written.
        value_cache: ``[B, Hkv, C, Dv]``, written; width 0 for a latent cache, which stores its value in the key.
        positions: int32 ``[B, Hkv, C]``, written; -1 marks an empty slot.
        lengths: int32 ``[B, Hkv]``, valid slots, advanced.
        key: ``[B, Hkv, T, Dk]``, the new tokens, of the cache's dtype.
        value: ``[B, Hkv, T, Dv]``.
        position: int32 ``[B, T]``, original positions, the same for all heads, or -1.
        key_scale: scales of a quantised cache, written: ``key_cache`` then holds codes, in the format that the two have
            (:func:`quantize`), and each token is quantised as it is appended.
        value_scale: likewise; None where ``value_cache`` has width 0.

    Raises:
        TypeError, ValueError: arguments that do not fit, before anything is written. Tokens beyond the capacity ``C``
            raise on a CPU; on a GPU, which is not waited for, they are dropped and ``lengths`` stops at ``C``.
    """
    if key_scale is not None:
        _append_codes(key_cache, value_cache, positions, lengths, key, value, position, key_scale, value_scale)
        return
    compiling = torch.compiler.is_compiling()
    if compiling or not append_is_plain(key_cache, value_cache, positions, lengths, key, value, position):
        _check_append(key_cache, value_cache, positions, lengths, key, value, position)
    if not compiling:
        key, value, position = _apart(key_cache, value_cache, positions, key, value, position)
    CACHE_APPEND(key_cache, value_cache, positions, lengths, key, value, position)


def _check_append(
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    lengths: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
) -> None:
    _check_cache("cache_append_", key_cache, value_cache, positions, lengths)
    check.check_tensor("key", key, "B Hkv T Dk")
    check.check_tensor("value", value, "B Hkv T Dv")
    for name, new, cache in (("key", key, key_cache), ("value", value, value_cache)):
        for dim, what in ((0, "batch"), (1, "heads"), (3, "head dim")):
            check.check_size(name, new, dim, cache.shape[dim], f"{name}_cache's {what}")
    check.check_size("value", value, 2, key.shape[2], "key's tokens")
    check.check_same_kind("key_cache", key_cache, key=key, value=value)
    check.check_int32("position", position, (key.shape[0], key.shape[2]), "B T", key_cache.device)
    check.check_no_grad("cache_append_", key=key, value=value)


def cache_compact_(
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    lengths: Tensor,
    scores: Tensor,
    budget: int,
    *,
    min_length: int = 0,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """Keep the ``budget`` best slots, in time order, of every row and head that holds more, in place.

    Only rows and heads with ``lengths > budget`` and ``lengths >= min_length`` change; there ``lengths`` becomes
    ``budget`` and the positions beyond are set to -1. Of equal scores the later slot (the higher position) is kept;
    NaN ranks lowest.

    Args:
        key_cache: ``[B, Hkv, C, Dk]``, written.
        value_cache: ``[B, Hkv, C, Dv]``, written; width 0 for a latent cache.
        positions: int32 ``[B, Hkv, C]``, written.
        lengths: int32 ``[B, Hkv]``, valid slots, written.
        scores: float32 ``[B, Hkv, C]`` (float64 for a float64 cache); slots beyond ``lengths`` are ignored.
        budget: tokens to keep, at least 1.
        min_length: rows and heads with fewer valid slots are left as they are.
        key_scale: scales of a quantised cache, which move with their codes, as in :func:`cache_append_`.
        value_scale: likewise; None where ``value_cache`` has width 0.

    Raises:
        TypeError, ValueError: arguments that do not fit, before anything is written.
    """
    if key_scale is None:
        _check_cache("cache_compact_", key_cache, value_cache, positions, lengths)
    else:
        _check_code_cache("cache_compact_", key_cache, value_cache, positions, lengths, key_scale, value_scale)
    check.check_tensor("scores", scores, "B Hkv C")
    if scores.shape != positions.shape:
        raise ValueError(f"scores must have shape {list(positions.shape)}, got {list(scores.shape)}")
    if scores.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"scores must be float32, got {scores.dtype}")
    check.check_device("scores", scores, "key_cache", key_cache)
    check.check_count("budget", budget, 1)
    check.check_count("min_length", min_length, 0)
    if key_scale is None:
        CACHE_COMPACT(key_cache, value_cache, positions, lengths, scores, budget, min_length)
        return
    codes, scales = (_as_bytes(key_cache), _as_bytes(value_cache)), _scales_of(key_scale, value_scale)
    CACHE_COMPACT_CODES(*codes, positions, lengths, *scales, scores, budget, min_length)


def _append_codes(
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    lengths: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
    key_scale: Tensor,
    value_scale: Tensor | None,
) -> None:
    """Quantise tokens and append their codes and scales."""
    arguments = (key_cache, value_cache, positions, lengths, key, value, position, key_scale, value_scale)
    if torch.compiler.is_compiling() or not append_codes_is_plain(*arguments):
        _check_append_codes(*arguments)
    if check.checks_values(key):
        check_finite(position, key=key, value=value)
    codes, scales = (_as_bytes(key_cache), _as_bytes(value_cache)), _scales_of(key_scale, value_scale)
    CACHE_APPEND_CODES(*codes, positions, lengths, *scales, key, value, position)


def _check_append_codes(
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    lengths: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
    key_scale: Tensor,
    value_scale: Tensor | None,
) -> None:
    storage = _check_code_cache("cache_append_", key_cache, value_cache, positions, lengths, key_scale, value_scale)
    check.check_tensor("key", key, "B Hkv T Dk")
    check.check_tensor("value", value, "B Hkv T Dv")
    for name, new, cache in (("key", key, key_cache), ("value", value, value_cache)):
        for dim, what in ((0, "batch"), (1, "heads")):
            check.check_size(name, new, dim, cache.shape[dim], f"{name}_cache's {what}")
        check.check_size(name, new, 3, code_columns(cache, storage), f"{name}_cache's head dim")
    check.check_size("value", value, 2, key.shape[2], "key's tokens")
    check.check_same_kind("key", key, value=value)
    check.check_device("key", key, "key_cache", key_cache)
    check.check_int32("position", position, (key.shape[0], key.shape[2]), "B T", key_cache.device)
    check.check_no_grad("cache_append_", key=key, value=value)


def check_finite(real: Tensor | None, **tensors: Tensor | None) -> None:
    """Tokens ``[B, H, T, D]`` hold neither NaN nor inf, which codes could not say.

    ``real [B, T]``, bool or positions, says which tokens count: True, or not -1; all by default.
    """
    for name, tensor in tensors.items():
        if tensor is None or tensor.numel() == 0 or tensor.is_meta:
            continue
        # One pass over what every step brings: the largest magnitude is NaN where any number is.
        if not math.isfinite(torch.linalg.vector_norm(tensor, math.inf)):
            bad = (~tensor.isfinite()).any(3).any(1)
            if real is not None:
                bad = bad & (real if real.dtype == torch.bool else real >= 0)
            if bool(bad.any()):
                row, token = bad.nonzero()[0].tolist()
                raise ValueError(f"{name} must be finite to be quantised, got NaN or inf in row {row}, token {token}")


def _scales_of(key_scale: Tensor, value_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both scales as the update operators take them; an empty one of width 0 where values have none."""
    if value_scale is None:
        return key_scale, key_scale.new_empty(*key_scale.shape[:3], 0)
    return key_scale, value_scale


def _as_bytes(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes


def _check_code_cache(
    operator: str,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    lengths: Tensor,
    key_scale: Tensor,
    value_scale: Tensor | None,
) -> str:
    """Codes, scales and integers fit each other; the format."""
    check.check_tensor("key_cache", key_cache, "B Hkv C codes")
    check.check_tensor("value_cache", value_cache, "B Hkv C codes")
    storage = check_codes("key_cache", key_cache, "key_scale", key_scale)
    for dim, what in enumerate(("batch", "heads", "slots")):
        check.check_size("value_cache", value_cache, dim, key_cache.shape[dim], f"key_cache's {what}")
    if value_cache.dtype != key_cache.dtype:
        raise TypeError(f"value_cache must have key_cache's dtype {key_cache.dtype}, got {value_cache.dtype}")
    if value_cache.shape[3]:
        other = check_codes("value_cache", value_cache, "value_scale", value_scale)
        if other != storage:
            raise ValueError(f"value_cache must be stored as key_cache is, in {storage!r}, got {other!r}")
    elif value_scale is not None:
        raise ValueError("value_scale must be None for a value_cache of width 0, got scales")
    check.check_int32("positions", positions, tuple(key_cache.shape[:3]), "B Hkv C", key_cache.device)
    check.check_int32("lengths", lengths, tuple(key_cache.shape[:2]), "B Hkv", key_cache.device)
    written = {"key_cache": key_cache, "value_cache": value_cache, "positions": positions, "lengths": lengths}
    written |= {"key_scale": key_scale} | ({} if value_scale is None else {"value_scale": value_scale})
    check.check_written(**{name: tensor for name, tensor in written.items() if not tensor.is_contiguous()})
    return storage


def _check_cache(operator: str, key_cache: Tensor, value_cache: Tensor, positions: Tensor, lengths: Tensor) -> None:
    check.check_tensor("key_cache", key_cache, "B Hkv C Dk")
    check.check_tensor("value_cache", value_cache, "B Hkv C Dv")
    for dim, what in enumerate(("batch", "heads", "slots")):
        check.check_size("value_cache", value_cache, dim, key_cache.shape[dim], f"key_cache's {what}")
    check.check_same_kind("key_cache", key_cache, value_cache=value_cache)
    check.check_int32("positions", positions, tuple(key_cache.shape[:3]), "B Hkv C", key_cache.device)
    check.check_int32("lengths", lengths, tuple(key_cache.shape[:2]), "B Hkv", key_cache.device)
    check.check_no_grad(operator, key_cache=key_cache, value_cache=value_cache)
    # Spelled out: this runs on every step, and a generator would cost it five calls.
    if not (
        key_cache.is_contiguous()
        and value_cache.is_contiguous()
        and positions.is_contiguous()
        and lengths.is_contiguous()
    ):
        check.check_written(key_cache=key_cache, value_cache=value_cache, positions=positions, lengths=lengths)


def _apart(
    key_cache: Tensor, value_cache: Tensor, positions: Tensor, key: Tensor, value: Tensor, position: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The new tokens, copied where they are a part of what is about to be written."""
    alias = torch._C._is_alias_of  # type: ignore[attr-defined]
    if alias(key, key_cache) or alias(key, value_cache):
        key = key.clone()
    if alias(value, value_cache) or alias(value, key_cache):
        value = value.clone()
    return key, value, position.clone() if alias(position, positions) else position


def _fake(*_: object) -> None:
    return None


_CACHE = "Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor(c!) positions, Tensor(d!) lengths"
CACHE_APPEND = register(
    "cache_append_",
    f"({_CACHE}, Tensor key, Tensor value, Tensor position) -> ()",
    cpu="fastattn.ops.cpu.cache:cache_append_",
    triton="fastattn.ops.triton.cache:cache_append_",
    fake=_fake,
)
CACHE_COMPACT = register(
    "cache_compact_",
    f"({_CACHE}, Tensor scores, SymInt budget, SymInt min_length) -> ()",
    cpu="fastattn.ops.cpu.cache:cache_compact_",
    triton="fastattn.ops.triton.cache:cache_compact_",
    fake=_fake,
)
_CODES = f"{_CACHE}, Tensor(e!) key_scale, Tensor(f!) value_scale"
CACHE_APPEND_CODES = register(
    "cache_append_codes_",
    f"({_CODES}, Tensor key, Tensor value, Tensor position) -> ()",
    cpu="fastattn.ops.cpu.cache:cache_append_codes_",
    triton="fastattn.ops.triton.append_codes:cache_append_codes_",
    fake=_fake,
)
CACHE_COMPACT_CODES = register(
    "cache_compact_codes_",
    f"({_CODES}, Tensor scores, SymInt budget, SymInt min_length) -> ()",
    cpu="fastattn.ops.cpu.cache:cache_compact_codes_",
    triton="fastattn.ops.triton.cache:cache_compact_codes_",
    fake=_fake,
)
