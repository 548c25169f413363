"""Weights that are not plain tensors on a device: quantized ones, offloaded ones."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn


class LinearOnly(Tensor):
    """Int8 codes that a linear layer can multiply by and nothing else can read: no view, no copy, no numbers."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> LinearOnly:
        shell: Any = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)
        shell.codes, shell.scale = codes, scale
        return shell

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear and isinstance(args[1], LinearOnly):
            weight = args[1].codes.to(args[1].scale.dtype) * args[1].scale
            return nn.functional.linear(args[0], weight, *args[2:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(f"{func} of a weight that only a linear layer reads")


def with_linear_only_weights_(model: nn.Module) -> nn.Module:
    """Every linear layer of ``model`` with a :class:`LinearOnly` weight, of the same numbers up to the codes' steps."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.detach()
            scale = weight.abs().amax(1, keepdim=True) / 127
            module.weight = nn.Parameter(LinearOnly((weight / scale).round().to(torch.int8), scale), False)
    return model


def dynamically_quantized(model: nn.Module) -> Any:
    """A copy whose linear layers are PyTorch's own quantized ones: ``weight`` and ``bias`` are methods there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated in favor of a package
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


class _Bringing:
    """In place of a module's forward: brings its tensors for the call, as the hooks of offloading packages do."""

    def __init__(self, module: nn.Module, names: list[str]) -> None:
        self.module, self.forward, self.execution_device = module, module.forward, torch.device("cpu")
        self.kept = {name: getattr(module, name) for name in names}
        self._place(self.leave())

    def leave(self) -> dict[str, Tensor]:
        return {name: _like(tensor, tensor.detach().to("meta")) for name, tensor in self.kept.items()}

    def _place(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            setattr(self.module, name, tensor)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._place(self.kept)
        try:
            return self.forward(*args, **kwargs)
        finally:
            self._place(self.leave())


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def offload_(model: nn.Module, *, buffers: bool = False) -> Any:
    """Keep every parameter of ``model`` on the meta device between calls of the module that owns it."""
    for module in model.modules():
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if buffers:
            names += [name for name in module.state_dict() if name in module._buffers]
        if names:
            hook = _Bringing(module, names)
            module.forward, module._hf_hook = hook, hook  # type: ignore[method-assign,assignment]
    return model
