"""Compile Triton kernels for chips that are not here, and read the resources off the machine code.

``triton.compile`` with an explicit target needs no GPU, and the triton wheel ships NVIDIA's assembler and disassembler.
What to compile comes from the kernel modules themselves: every module named in ``configs.KERNEL_MODULES`` lists calls
of its launchers in ``offline_cases()``; the launches those calls would make are recorded and compiled as the
just-in-time compiler would specialize them (integers equal to 1, pointers and strides that are multiples of 16).
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import os
import re
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastattn.ops.triton import _launch
from fastattn.ops.triton.configs import KERNEL_MODULES, OfflineCase

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.bool: "i1",
}
# Registers of one processor and most programs it holds, for the occupancy estimate.
REGISTERS = 65536
MOST_WARPS = {"sm_80": 64, "sm_86": 48, "sm_90": 64, "sm_100": 64}
PROCESSOR_SHARED = {"sm_80": 164, "sm_86": 100, "sm_90": 228, "sm_100": 228, "gfx942": 64}


@dataclass(frozen=True)
class Job:
    """One kernel to compile: plain data, so that it travels to a worker process and hashes."""

    case: str
    family: str
    module: str
    kernel: str
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    options: tuple[tuple[str, int], ...]
    narrow: bool

    @property
    def config(self) -> str:
        """The part of the constexprs that the config table chose, and the launch options."""
        tile = {name: value for name, value in self.constexprs if name.startswith("BLOCK_")}
        short = " ".join(f"{name[6:].lower()}{value}" for name, value in tile.items())
        launch = dict(self.options)
        return f"{short} w{launch.get('num_warps', 4)} s{launch.get('num_stages', 3)}".strip()


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes from its chip.

    Attributes:
        registers: per thread.
        spills: bytes of local memory per thread that the compiler spilled registers to.
        local: loads and stores of local memory in the machine code.
        shared: bytes of shared memory per program.
        matrix: matrix instructions and how many of each.
        wide_loads: 16-byte (or bulk) loads of global memory.
        dots: the kernel holds a matrix product.
        occupancy: programs that one processor holds at a time, by registers, warps and shared memory; an estimate.
        error: why the kernel did not compile, else empty.
    """

    registers: int = 0
    spills: int = 0
    local: int = 0
    shared: int = 0
    matrix: dict[str, int] = field(default_factory=dict)
    wide_loads: int = 0
    dots: bool = False
    occupancy: int = 0
    error: str = ""

    def row(self) -> dict[str, Any]:
        return asdict(self)


def all_cases() -> Iterator[OfflineCase]:
    """The cases of every kernel module."""
    for name in KERNEL_MODULES:
        yield from importlib.import_module(f"fastattn.ops.triton.{name}").offline_cases()


def jobs_of(case: OfflineCase) -> Iterator[Job]:
    """What ``case`` launches on each of its chip families."""
    for family in case.families:
        with _launch.assume_target(_launch.TYPICAL[family]), _launch.record_launches() as launches:
            case.launch()
        for launch in launches:
            yield _job(case, family, launch)


def _job(case: OfflineCase, family: str, launch: _launch.Launch) -> Job:
    """Specialize a launch as Triton's just-in-time compiler would."""
    kernel = launch.kernel
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    aligned = []
    for parameter in kernel.params:
        name = parameter.name
        value = launch.arguments.get(name, parameter.default)
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[name], constexprs[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            aligned.append(name)
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                aligned.append(name)
        else:
            raise TypeError(f"{kernel.__name__}: run-time argument {name} is a {type(value).__name__}")
    return Job(
        case=case.name,
        family=family,
        module=kernel.fn.__module__,
        kernel=kernel.fn.__name__,
        signature=tuple(signature.items()),
        constexprs=tuple(constexprs.items()),
        aligned=tuple(aligned),
        options=tuple(sorted(launch.options.items())),
        narrow=kernel.fn.__name__ in case.narrow,
    )


def source_of(job: Job) -> str:
    """A fingerprint of all that decides ``job``'s machine code but the compiler: code without comments, arguments."""
    kernel = getattr(importlib.import_module(job.module), job.kernel)
    parts: dict[str, str] = {}
    _collect(kernel, parts)
    plain = (job.family, job.signature, job.constexprs, job.aligned, job.options)
    return hashlib.sha256(repr((sorted(parts.items()), plain)).encode()).hexdigest()[:12]


def _collect(function: Any, parts: dict[str, str]) -> None:
    """Code and compile-time constants that a Triton function reaches, by qualified name."""
    name = f"{function.fn.__module__}.{function.fn.__name__}"
    if name in parts:
        return
    tree = ast.parse(textwrap.dedent(inspect.getsource(function.fn)))
    body = tree.body[0].body
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        del body[0]  # the docstring
    parts[name] = ast.unparse(tree)
    for node in ast.walk(tree):
        value = function.fn.__globals__.get(node.id) if isinstance(node, ast.Name) else None
        if isinstance(value, triton.runtime.JITFunction):
            _collect(value, parts)
        elif isinstance(value, triton.language.constexpr):
            parts[f"{name}.{node.id}"] = repr(value.value)


def compile_job(job: Job) -> Resources:
    """Machine code for ``job``, and its resources."""
    kernel = getattr(importlib.import_module(job.module), job.kernel)
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature=dict(job.signature),
        constexprs=dict(job.constexprs),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in job.aligned},
    )
    try:
        compiled = triton.compile(source, target=TARGETS[job.family], options=dict(job.options))
    except Exception as error:  # any stage may fail in its own way; the table reports it as a breach
        return Resources(error=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
    dots = "tt.dot" in compiled.asm["ttir"]
    shared = int(compiled.metadata.shared)
    warps = dict(job.options).get("num_warps", 4)
    if job.family.startswith("gfx"):
        return _amd(compiled.asm["amdgcn"], shared, dots, warps)
    return _nvidia(compiled.asm["cubin"], job.family, shared, dots, warps)


def _tool(name: str, *arguments: str) -> str:
    folder = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
    return subprocess.run([os.path.join(folder, name), *arguments], capture_output=True, text=True, check=True).stdout


def _nvidia(cubin: bytes, family: str, shared: int, dots: bool, warps: int) -> Resources:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(cubin)
        usage = _tool("cuobjdump", "-res-usage", path)
        assembly = _tool("nvdisasm", path)
    registers = int(re.search(r"REG:(\d+)", usage).group(1))
    stack = int(re.search(r"STACK:(\d+)", usage).group(1))
    local = int(re.search(r"LOCAL:(\d+)", usage).group(1))
    matrix = {name: len(re.findall(rf"\b{name}\b", assembly)) for name in ("HGMMA", "HMMA", "UTCHMMA")}
    wide = r"LDG\.E\.[A-Z0-9.]*128|LDGSTS\.E\.[A-Z0-9.]*128|UTMALDG|UBLKCP"
    used = max(registers, 1)
    occupancy = min(
        REGISTERS // (-(-used // 8) * 8 * 32 * warps),
        MOST_WARPS[family] // warps,
        PROCESSOR_SHARED[family] * 1024 // (shared + 1024),
    )
    return Resources(
        registers=registers,
        spills=stack + local,
        local=len(re.findall(r"\b(?:STL|LDL)\b", assembly)),
        shared=shared,
        matrix={name: count for name, count in matrix.items() if count},
        wide_loads=len(re.findall(wide, assembly)),
        dots=dots,
        occupancy=occupancy,
    )


def _amd(assembly: str, shared: int, dots: bool, warps: int) -> Resources:
    def read(name: str) -> int:
        found = re.search(name + r":?\s+(\d+)", assembly)
        return int(found.group(1)) if found else 0

    registers = read(r"\.vgpr_count")
    matrix = len(re.findall(r"\bv_mfma", assembly))
    # 512 vector registers per lane of each of the four SIMD units, accumulation registers included
    by_registers = 4 * (512 // max(registers + read(r"\.agpr_count"), 1)) // warps
    by_shared = PROCESSOR_SHARED["gfx942"] * 1024 // max(shared, 1)
    return Resources(
        registers=registers,
        spills=read(r"\.private_segment_fixed_size"),
        local=len(re.findall(r"\bscratch_(?:load|store)", assembly)),
        shared=shared,
        matrix={"v_mfma": matrix} if matrix else {},
        wide_loads=len(re.findall(r"(?:global|buffer)_load_(?:dwordx4|b128)", assembly)),
        dots=dots,
        occupancy=max(min(by_registers, by_shared, 32 // warps), 1 if registers <= 512 else 0),
    )
