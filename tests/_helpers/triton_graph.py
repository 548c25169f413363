"""The graph that torch.compile hands to Inductor, with the Triton branch forced and no GPU."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops

from fastattn.ops import _register


class _NoDriver:
    """What Triton asks of a driver while a kernel is analyzed: a target, nothing that runs."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def is_active(self) -> bool:
        return True

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextlib.contextmanager
def _without_device() -> Iterator[None]:
    from triton.runtime import driver

    previous = driver._active
    driver._active = _NoDriver()
    try:
        yield
    finally:
        driver._active = previous


class Captured:
    """Graphs of one compiled function: ``forward`` and, where it was differentiated, ``backward``."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def count(self, graph: int = 0) -> Counter[str]:
        """How often each operator and kernel occurs: kernels by their name, operators as ``aten.add``."""
        found: Counter[str] = Counter()
        for node in self.graphs[graph].graph.nodes:
            if node.op == "call_function":
                found[node.meta["name"]] += 1
        return found

    def kernels(self, graph: int = 0) -> list[str]:
        """Names of the kernels in the order of their launches."""
        return [node.meta["name"] for node in self.graphs[graph].graph.nodes if "kernel_idx" in node.kwargs]

    def clones(self, graph: int = 0) -> list[str]:
        """Copies that the graph makes: of tensors that kernels write, and explicit ones."""
        copies = []
        for node in self.graphs[graph].graph.nodes:
            copies += [f"{node.meta['name']} clones {name}" for name in node.kwargs.get("tensors_to_clone", ())]
            if node.meta["name"] == "aten.copy_" and node.args[0] is node.args[1]:
                continue  # what re-inplacing leaves of a copy; Inductor drops it
            if node.op == "call_function" and node.meta["name"] in ("aten.clone", "aten.copy", "aten.copy_"):
                copies.append(node.meta["name"])
        return copies


def _name(node: torch.fx.Node) -> str:
    if "kernel_idx" in node.kwargs:
        from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

        kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
        return kernel.fn.__name__
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket)
    return getattr(target, "__name__", str(target))


def capture(function: Callable[..., Any], *args: Any, backward: bool = False, dynamic: bool = False) -> Captured:
    """Compile ``function`` for ``args`` (CPU tensors) as for a GPU, and keep the graphs instead of running them."""
    captured = Captured()

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        reinplace_inplaceable_ops(torch._inductor.fx_utils.FakeTensorUpdater(graph), graph.graph)
        for node in graph.graph.nodes:
            node.meta["name"] = _name(node)  # now: dynamo forgets the kernels when it is reset
        captured.graphs.append(graph)
        outputs = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in _outputs(graph)]

        def stand_in(*_: Any) -> list[Any]:
            # kernels can't run: results of the right shape do
            return [
                torch.zeros([int(n) for n in x.shape], dtype=x.dtype) if isinstance(x, torch.Tensor) else x
                for x in outputs
            ]

        return make_boxed_func(stand_in)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, keep_inference_input_mutations=True)
    with _without_device(), _register.force_triton():
        result = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
        if backward:
            result.sum().backward()
    torch._dynamo.reset()
    return captured


def _outputs(graph: torch.fx.GraphModule) -> list[Any]:
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    return list(output.args[0])
