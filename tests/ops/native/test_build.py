"""How the native kernels come about: compiled once, found again, and done without where that fails."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fastattn.ops.cpu.native import _build
from tests._helpers.native import needs_native

pytestmark = pytest.mark.cpu_only

# Prints whether the native kernels are in use and that the result is right either way.
PROGRAM = """
import torch
from fastattn import ops
from fastattn.ops import reference
from fastattn.ops.cpu import native

query, key = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 40, 16)
lengths = torch.full((1, 2), 33, dtype=torch.int32)
for _ in range(2):
    out = ops.decode_attention(query, key, key, lengths)
exact = reference.decode_attention(query.double(), key.double(), key.double(), lengths)
assert (out - exact).abs().max() < 1e-5
print("native" if native.operators() else "fallback")
"""


class Compiler:
    """Stands in for a compiler: takes a library that was built before, so that a test takes no half minute."""

    def __init__(self, folder: Path, then: str = "") -> None:
        self.calls, self.path = folder / "calls", folder / "compiler"
        self.path.write_text(
            f"#!{sys.executable}\n"
            + textwrap.dedent(f"""
            import os, shutil, signal, sys, time
            output = sys.argv[sys.argv.index("-o") + 1]
            with open({str(self.calls)!r}, "a") as file:
                file.write("x")
            library = {str(_build.library())!r}
            """)
            + (textwrap.dedent(then) or "time.sleep(1)\nshutil.copy(library, output)\n")
        )
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)

    @property
    def count(self) -> int:
        return len(self.calls.read_text()) if self.calls.exists() else 0


def start(
    cache: Path, compiler: object, mode: str = "1", command: tuple[str, ...] = ("-c", PROGRAM)
) -> subprocess.Popen:
    environment = os.environ | {
        "TORCH_EXTENSIONS_DIR": str(cache), "CXX": str(compiler), "FASTATTN_NATIVE": mode, "OMP_NUM_THREADS": "2"
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen) -> tuple[str, str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.strip(), err.strip()


@pytest.fixture(autouse=True)
def _built_before() -> None:
    needs_native()


def test_processes_that_start_at_once_compile_once(tmp_path: Path) -> None:
    compiler, cache = Compiler(tmp_path), tmp_path / "cache"
    found = [finish(process) for process in [start(cache, compiler.path) for _ in range(3)]]
    assert [out for out, _ in found] == ["native"] * 3, found
    assert compiler.count == 1
    assert sum("compiles its CPU kernels" in err for _, err in found) == 1
    assert finish(start(cache, "/bin/false")) == ("native", "")  # found again, and nothing is said
    (folder,) = cache.iterdir()
    assert sorted(path.suffix for path in folder.iterdir()) == ["", ".so"]  # the lock and the library


def test_a_failing_compiler_falls_back_with_one_message(tmp_path: Path) -> None:
    out, err = finish(start(tmp_path / "cache", "/bin/false"))
    assert out == "fallback"
    assert err.count("CPU kernels are not used") == 1
    assert "/bin/false failed with status 1" in err
    assert "python -m fastattn.native" in err


def test_a_missing_compiler_falls_back_with_one_message(tmp_path: Path) -> None:
    out, err = finish(start(tmp_path / "cache", tmp_path / "nowhere"))
    assert out == "fallback"
    assert err.count("\n") == 0
    assert "is not a command" in err
    assert "set CXX" in err


def test_a_cache_that_cannot_be_written_falls_back_with_one_message(tmp_path: Path) -> None:
    """A file stands where the folder should be: permissions do not stop the user that CI runs as."""
    (tmp_path / "cache").write_text("")
    out, err = finish(start(tmp_path / "cache", Compiler(tmp_path).path))
    assert out == "fallback"
    assert err.count("\n") == 0
    assert "TORCH_EXTENSIONS_DIR" in err


def test_a_build_that_was_killed_is_not_used(tmp_path: Path) -> None:
    killing = """
        with open(output, "wb") as file:
            file.write(open(library, "rb").read()[:50_000])
        os.kill(os.getppid(), signal.SIGKILL)
    """
    cache = tmp_path / "cache"
    process = start(cache, Compiler(tmp_path, killing).path)
    process.communicate(timeout=300)
    assert process.returncode == -9
    compiler = Compiler(tmp_path)
    assert finish(start(cache, compiler.path))[0] == "native"
    assert compiler.count == 2


def test_a_cached_file_that_was_cut_short_is_not_used(tmp_path: Path) -> None:
    """Loading half a library would crash, not raise."""
    folder = tmp_path / "cache" / f"fastattn_native-{_build.key()}"
    folder.mkdir(parents=True)
    whole = _build.library()
    (folder / whole.name).write_bytes(whole.read_bytes()[:100_000])
    compiler = Compiler(tmp_path)
    assert finish(start(tmp_path / "cache", compiler.path))[0] == "native"
    assert compiler.count == 1


def test_a_compiler_that_makes_no_library_falls_back(tmp_path: Path) -> None:
    out, err = finish(start(tmp_path / "cache", Compiler(tmp_path, 'open(output, "w").write("text")').path))
    assert out == "fallback"
    assert "cannot be loaded" in err


def test_a_build_names_sources_flags_torch_and_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = {_build.key()}
    _build._key.cache_clear()
    try:
        for change in ("torch", "processor", "vectors", "source"):
            with monkeypatch.context() as patch:
                if change == "torch":
                    patch.setattr(_build.torch, "__version__", "9.9")
                elif change == "processor":
                    patch.setattr(_build, "features", lambda: "another")
                elif change == "vectors":
                    patch.setattr(_build.torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
                else:
                    (tmp_path / "native.cpp").write_text("")
                    patch.setattr(_build, "_SOURCES", tmp_path)
                keys.add(_build.key())
                _build._key.cache_clear()
    finally:
        _build._key.cache_clear()
    assert len(keys) == 5


def test_require_raises(tmp_path: Path) -> None:
    process = start(tmp_path / "cache", "/bin/false", mode="require")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "RuntimeError: FASTATTN_NATIVE=require, but the compiler /bin/false failed" in err


def test_zero_neither_builds_nor_speaks(tmp_path: Path) -> None:
    assert finish(start(tmp_path / "cache", "/bin/false", mode="0")) == ("fallback", "")
    assert not (tmp_path / "cache").exists()


def test_another_mode_is_refused(tmp_path: Path) -> None:
    process = start(tmp_path / "cache", "/bin/false", mode="yes")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "ValueError: the environment variable FASTATTN_NATIVE must be 0, 1 or require, got 'yes'" in err


def test_importing_builds_nothing(tmp_path: Path) -> None:
    compiler = Compiler(tmp_path)
    command = ("-c", "import fastattn, fastattn.ops, fastattn.ops.cpu.decode")
    assert finish(start(tmp_path / "cache", compiler.path, command=command)) == ("", "")
    assert compiler.count == 0


def test_building_ahead(tmp_path: Path) -> None:
    compiler, command = Compiler(tmp_path), ("-m", "fastattn.native")
    out, _ = finish(start(tmp_path / "cache", compiler.path, command=command))
    assert str(tmp_path / "cache") in out
    for name in _build.OPERATORS:
        assert name in out
    assert compiler.count == 1
    process = start(tmp_path / "other", "/bin/false", command=command)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "failed with status 1" in err
