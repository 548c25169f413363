"""Compiling the native kernels, and the cache of what was compiled.

One folder per key: a hash of the sources, the flags, the version of torch and the processor's features, so that a
build for anything else is never found. In it one library, whose name holds a hash of its contents: what a full disk or
a killed process left half written is not taken for a library. Libraries are compiled under another name and renamed,
and processes wait for each other's build.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

OPERATORS = (
    "decode_attention",
    "latent_decode",
    "decode_codes",
    "merge_attention",
    "cache_append_",
    "cache_compact_",
    "cache_append_codes_",
    "cache_compact_codes_",
    "score_knorm",
    "score_key_diff",
)

_SOURCES = Path(__file__).parent
_TIMEOUT = 600.0  # seconds that a compiler, or another process's build, may take

_log = logging.getLogger("fastattn")


class BuildError(Exception):
    """The kernels cannot be built or loaded; the message says why and what to do."""


def library() -> Path:
    """The compiled library, compiled first where the cache has none.

    Raises:
        BuildError: there is none and it cannot be compiled.
    """
    folder = cache_folder() / f"fastattn_native-{key()}"
    found = _find(folder)
    if found is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder):
            return _find(folder) or _compile(folder)
    except OSError as error:
        raise BuildError(
            f"the folder {folder} cannot be written ({error}); set TORCH_EXTENSIONS_DIR to one that can"
        ) from error


def cache_folder() -> Path:
    """Where PyTorch keeps what it compiles: ``TORCH_EXTENSIONS_DIR``, else under the user's cache."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "torch_extensions"


def key() -> str:
    """Names a build: the same sources, flags, torch and processor features give the same."""
    return _key(torch.backends.cpu.get_cpu_capability())


@functools.cache
def _key(capability: str) -> str:
    parts = [torch.__version__, str(torch.version.git_version), platform.system(), platform.machine(), features()]
    parts += _flags(capability)
    for source in sorted([*_SOURCES.glob("*.h"), *_SOURCES.glob("*.cpp")]):
        parts += [source.name, source.read_text(encoding="utf-8")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


@functools.cache
def features() -> str:
    """What the processor can do, as the operating system lists it."""
    if sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    with contextlib.suppress(OSError):
        wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part", "isa", "cpu\t")
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
        found = [line.split(":", 1)[1].strip() for line in lines if line.startswith(wanted) and ":" in line]
        if found:
            return "; ".join(found)
    return platform.processor()


def _flags(capability: str) -> list[str]:
    """How to compile for this processor, with the vector types that this PyTorch uses on it."""
    flags = ["-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-fno-math-errno"]
    machine = platform.machine().lower()
    flags.append("-march=native" if machine in ("x86_64", "amd64", "i686") else "-mcpu=native")
    vectors = capability if capability in ("AVX2", "AVX512") else "DEFAULT"
    flags += [f"-DCPU_CAPABILITY_{vectors}", f"-DCPU_CAPABILITY={vectors}"]
    flags += ["-Xpreprocessor", "-fopenmp"] if sys.platform == "darwin" else ["-fopenmp"]
    return flags


def _compiler() -> list[str]:
    chosen = os.environ.get("CXX")
    names = [chosen] if chosen else ["c++", "g++", "clang++"]
    for name in names:
        command = shlex.split(name)
        if command and shutil.which(command[0]):
            return command
    what = f"CXX={chosen} is not a command" if chosen else "no C++ compiler was found (c++, g++, clang++)"
    raise BuildError(f"{what}; install one, or set CXX to it")


def _command(compiler: list[str], output: Path) -> list[str]:
    torch_folder = Path(torch.__file__).parent
    command = [*compiler, *_flags(torch.backends.cpu.get_cpu_capability()), f'-DFASTATTN_BUILD="{key()}"']
    for include in ("include", "include/torch/csrc/api/include"):
        command += ["-isystem", str(torch_folder / include)]
    # OpenMP's own library is not named when linking: the one that torch has loaded is to be used, and only that.
    command += [str(_SOURCES / "native.cpp"), "-shared", "-o", str(output), f"-L{torch_folder / 'lib'}"]
    if sys.platform == "darwin":
        command += ["-undefined", "dynamic_lookup"]
    return [*command, "-ltorch_cpu", "-lc10"]


def _compile(folder: Path) -> Path:
    if sys.platform == "win32":
        raise BuildError("they are not built on Windows")
    compiler = _compiler()
    _log.warning("fastattn compiles its CPU kernels, which takes about half a minute, once: %s", folder)
    with tempfile.TemporaryDirectory(prefix="build-", dir=folder) as scratch:
        output = Path(scratch) / "native.so"
        try:
            result = subprocess.run(
                _command(compiler, output), capture_output=True, text=True, errors="replace", timeout=_TIMEOUT
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"the compiler {shlex.join(compiler)} failed ({error}); set CXX to another") from error
        if result.returncode != 0 or not output.is_file():
            raise BuildError(
                f"the compiler {shlex.join(compiler)} failed with status {result.returncode}"
                f" ({_complaint(result.stderr)}); set CXX to another"
            )
        path = folder / f"native-{_digest(output)}.so"
        os.replace(output, path)
    return path


def _complaint(stderr: str) -> str:
    """The line of a compiler's output that says what is wrong."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[-1] if lines else "it says nothing")[:300]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:20]


def _find(folder: Path) -> Path | None:
    """A library of which every byte is what was compiled."""
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob("native-*.so")):
            with contextlib.suppress(OSError):
                if path.stem == f"native-{_digest(path)}":
                    return path
    return None


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which dies with its process; without one where the file system has none."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with open(folder / "lock", "w") as file:
        deadline = time.monotonic() + _TIMEOUT
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
            except OSError:
                break
        yield
