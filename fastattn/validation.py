"""Argument checks shared by every layer of the package: each names the argument, what came and what was expected."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd import forward_ad

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensor(name: str, value: object, dims: str) -> None:
    """``value`` is a tensor with as many dims as ``dims`` names, as in ``"B H Sq D"``."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor [{dims}], got {type(value).__name__}")
    if value.dim() != len(dims.split()):
        raise ValueError(f"{name} must have shape [{dims}], got {list(value.shape)}")


def check_size(name: str, value: Tensor, dim: int, expected: int, because: str) -> None:
    """Size ``dim`` of ``value`` equals ``expected``; ``because`` says where the expectation comes from."""
    if value.shape[dim] != expected:
        raise ValueError(f"{name} must have size {expected} in dim {dim} ({because}), got {list(value.shape)}")


def check_same_kind(reference_name: str, reference: Tensor, **others: Tensor) -> None:
    """A floating dtype, shared by all tensors, on one device."""
    if reference.dtype not in FLOATS:
        raise TypeError(f"{reference_name} must be float16, bfloat16, float32 or float64, got {reference.dtype}")
    for name, other in others.items():
        if other.dtype != reference.dtype:
            raise TypeError(f"{name} must have {reference_name}'s dtype {reference.dtype}, got {other.dtype}")
        check_device(name, other, reference_name, reference)


def check_device(name: str, value: Tensor, reference_name: str, reference: Tensor) -> None:
    if value.device != reference.device:
        raise ValueError(f"{name} must be on {reference_name}'s device {reference.device}, got {value.device}")


def check_int32(name: str, value: object, shape: tuple[int, ...], dims: str, device: torch.device) -> None:
    """``value`` is an int32 tensor of exactly ``shape`` on ``device``; ``dims`` names the shape."""
    check_tensor(name, value, dims)
    assert isinstance(value, Tensor)  # narrowed by check_tensor
    if value.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {value.dtype}")
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} must have shape [{dims}] = {list(shape)}, got {list(value.shape)}")
    if value.device != device:
        raise ValueError(f"{name} must be on {device}, got {value.device}")


def check_written(**tensors: Tensor) -> None:
    """Elements of a tensor that is written in place lie in memory of their own, unlike an expanded tensor's."""
    for name, tensor in tensors.items():
        reach = 0  # of the dims with smaller strides, from a first element to a last
        for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if size > 1 and stride <= reach and tensor.numel():
                kind = "an expanded tensor" if stride == 0 else "a tensor that overlaps itself,"
                raise ValueError(
                    f"{name} must have memory of its own for every element, to be written in place, got {kind} "
                    f"{list(tensor.shape)} with strides {list(tensor.stride())}: call .contiguous()"
                )
            reach += stride * (size - 1)


def check_groups(query: Tensor, key: Tensor, query_name: str = "query", key_name: str = "key") -> None:
    heads, kv_heads = query.shape[1], key.shape[1]
    if kv_heads == 0 or heads % kv_heads != 0:
        raise ValueError(f"{query_name} must have a multiple of {key_name}'s {kv_heads} heads, got {heads}")


def check_count(name: str, value: object, minimum: int) -> None:
    """``value`` is an integer of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")


def resolve_scale(scale: float | None, head_dim: int) -> float:
    """The softmax scale, ``head_dim ** -0.5`` unless given."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    if isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymFloat)):
        raise TypeError(f"scale must be a float or None, got {type(scale).__name__}")
    if not -math.inf < scale < math.inf:  # torch.compile traces comparisons of a symbolic float, not math.isfinite
        raise ValueError(f"scale must be finite, got {scale}")
    return float(scale)


def fixed(value: float) -> float:
    """``value``, as a number where torch.compile traces a symbol: an operator in ``torch.cond`` takes none."""
    if torch.compiler.is_compiling():
        from torch.fx.experimental.symbolic_shapes import guard_scalar

        return float(guard_scalar(value))
    return value


def check_no_grad(operator: str, **tensors: Tensor | None) -> None:
    """Refuse a derivative, of either mode, that the operator could not pass on."""
    if forward_ad._current_level >= 0:
        refuse_forward_mode(operator, *tensors.values())
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise ValueError(
                f"{operator} has no gradient, but {name} requires one: "
                "call it under torch.no_grad() or detach the argument"
            )


def refuse_forward_mode(operator: str, *tensors: Tensor | None) -> None:
    """Forward-mode differentiation would give zeros: an operator has a formula for backward only, or none."""
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(
                f"{operator} has no forward-mode derivative (torch.func.jvp, jacfwd): use "
                "autograd (torch.autograd.grad) or fastattn.ops.reference"
            )


FAKE = torch._C._TorchDispatchModeKey.FAKE


def hides_values() -> bool:
    """Tensors stand for others: a compiler or an export is tracing, or the caller has entered a FakeTensorMode."""
    return torch.compiler.is_compiling() or torch._C._get_dispatch_mode(FAKE) is not None


has_autocast = torch._C._is_autocast_available  # the meta device has none, and asking whether it is on raises


def autocasts(device_type: str) -> bool:
    """Autocast is on for tensors of this kind of device."""
    return has_autocast(device_type) and torch.is_autocast_enabled(device_type)


def checks_values(tensor: Tensor) -> bool:
    """Values (as against shapes and dtypes) are checked in eager mode on a CPU only, where looking costs no wait."""
    return tensor.device.type == "cpu" and not hides_values()


def find_split_row(mask: Tensor) -> tuple[int, int] | None:
    """The first row of a bool ``mask [B, T]`` whose True stretch is not contiguous, and how many stretches it has."""
    if mask.shape[1] == 0:
        return None
    stretches = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]
    split = (stretches > 1).nonzero()
    if split.shape[0] == 0:
        return None
    row = int(split[0])
    return row, int(stretches[row])
