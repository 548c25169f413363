"""What ``import fastattn`` loads and changes: every check runs in a process of its own."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HEAVY = ("triton", "transformers", "torch._dynamo", "torch._inductor", "torch.distributed.tensor")

NEED_TRANSFORMERS = (
    "compressed",
    "compressed_cache",
    "load_prefix",
    "prefill",
    "save_prefix",
    "score_continuations",
)

BLOCK = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run(code: str) -> dict:
    """Run ``code`` in a new interpreter; it prints one JSON object as its last line."""
    code = f"NEED_TRANSFORMERS = {NEED_TRANSFORMERS!r}\n{textwrap.dedent(code)}"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_import_loads_nothing_heavy() -> None:
    found = run(f"""
        import json, sys, time
        import torch

        loaded, seconds = {{}}, {{}}
        start = time.perf_counter()
        import fastattn
        seconds["fastattn"] = time.perf_counter() - start
        loaded["fastattn"] = [m for m in {HEAVY} if m in sys.modules]
        import fastattn.ops
        seconds["fastattn.ops"] = time.perf_counter() - start
        loaded["fastattn.ops"] = [m for m in {HEAVY} if m in sys.modules]
        print(json.dumps({{"loaded": loaded, "seconds": seconds}}))
    """)
    for module, seconds in found["seconds"].items():
        print(f"import {module}: {1e3 * seconds:.1f} ms after torch")
    assert found["loaded"] == {"fastattn": [], "fastattn.ops": []}


def test_import_without_triton_and_transformers() -> None:
    found = run(
        BLOCK
        + textwrap.dedent("""
        import json
        import torch, fastattn, fastattn.ops

        blocked = []
        for name in ("triton", "transformers"):
            try:
                __import__(name)
            except ImportError:
                blocked.append(name)
        key = torch.randn(1, 2, 3, 8)
        out = fastattn.ops.score_knorm(key, torch.full((1, 2), 3, dtype=torch.int32))
        exported, refused = [], {}
        for name in fastattn.__all__:
            try:
                exported.append(type(getattr(fastattn, name)).__name__)
            except ImportError as reason:
                refused[name] = str(reason)
        error = (out + key.norm(dim=-1)).abs().max().item()
        print(json.dumps({"blocked": blocked, "exported": exported, "refused": refused, "error": error}))
        """)
    )
    assert found["blocked"] == ["triton", "transformers"]
    assert len(found["exported"]) > 5
    for name in NEED_TRANSFORMERS:
        expected = f'fastattn.{name} needs transformers: pip install "fastattn[transformers]"'
        assert found["refused"].pop(name) == expected
    assert found["refused"] == {}
    assert found["error"] < 1e-5


def test_import_changes_no_global_state() -> None:
    found = run("""
        import json, locale, logging, os, random, signal, sys, threading, warnings
        import numpy, torch

        def snapshot():
            return {
                "default_dtype": str(torch.get_default_dtype()),
                "default_device": str(torch.get_default_device()),
                "grad": torch.is_grad_enabled(),
                "inference": torch.is_inference_mode_enabled(),
                "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()],
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "matmul_precision": torch.get_float32_matmul_precision(),
                "tf32": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
                "sdp": [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()],
                "torch_rng": torch.random.get_rng_state().sum().item(),
                "python_rng": hash(random.getstate()),
                "numpy_rng": int(numpy.random.get_state()[1].sum()),
                "environ": dict(os.environ),
                "warnings": [str(f) for f in warnings.filters],
                "logging": [len(logging.root.handlers), logging.root.level],
                "path": list(sys.path),
                "meta_path": len(sys.meta_path),
                "excepthook": sys.excepthook is sys.__excepthook__,
                "sigint": str(signal.getsignal(signal.SIGINT)),
                "recursion": sys.getrecursionlimit(),
                "locale": locale.setlocale(locale.LC_ALL),
                "cwd": os.getcwd(),
            }

        before = snapshot()
        import fastattn
        import fastattn.ops
        for name in fastattn.__all__:
            if name not in NEED_TRANSFORMERS:  # those load transformers, which changes the environment
                getattr(fastattn, name)
        after = snapshot()
        print(json.dumps({"changed": [key for key in before if before[key] != after[key]]}))
    """)
    assert found["changed"] == []


def test_import_leaves_compiler_configuration_alone() -> None:
    found = run("""
        import json
        import torch._dynamo.config as dynamo, torch._inductor.config as inductor, torch._functorch.config as functorch

        def snapshot():
            return [config.get_config_copy() for config in (dynamo, inductor, functorch)]

        before = snapshot()
        import fastattn
        import fastattn.ops
        for name in fastattn.__all__:
            if name not in NEED_TRANSFORMERS:  # those load transformers
                getattr(fastattn, name)
        print(json.dumps({"same": snapshot() == before}))
    """)
    assert found["same"]


def test_import_twice_and_reload() -> None:
    found = run("""
        import importlib, json, sys
        import torch, fastattn, fastattn.ops

        def error():
            key = torch.randn(1, 2, 3, 8)
            out = fastattn.ops.score_knorm(key, torch.full((1, 2), 3, dtype=torch.int32))
            return (out + key.norm(dim=-1)).abs().max().item()

        errors = [error()]
        importlib.import_module("fastattn")
        errors.append(error())
        importlib.reload(fastattn)
        importlib.reload(fastattn.ops)
        errors.append(error())
        names = [n for n in sys.modules if n.split(".")[0] == "fastattn"]
        for name in sorted(n for n in names if n.startswith("fastattn.ops.")):
            importlib.reload(sys.modules[name])
            errors.append(error())
        importlib.reload(fastattn.ops)
        errors.append(error())
        print(json.dumps({"errors": errors}))
    """)
    assert max(found["errors"]) < 1e-5


def test_import_again_after_the_modules_were_dropped() -> None:
    """Notebooks and test runners drop modules and import them anew: operators must register again."""
    found = run("""
        import json, sys
        import torch, fastattn, fastattn.ops
        for name in [n for n in sys.modules if n.split(".")[0] == "fastattn"]:
            del sys.modules[name]
        import fastattn, fastattn.ops
        key = torch.randn(1, 2, 3, 8)
        out = fastattn.ops.score_knorm(key, torch.full((1, 2), 3, dtype=torch.int32))
        print(json.dumps({"error": (out + key.norm(dim=-1)).abs().max().item()}))
    """)
    assert found["error"] < 1e-5


@pytest.mark.parametrize("name", ["fastattn", "fastattn.modules", "fastattn.convert", "fastattn.distributed"])
def test_an_unknown_name_is_answered_with_the_known_ones(name: str) -> None:
    package = importlib.import_module(name)
    known = ", ".join(sorted(package.__all__))
    with pytest.raises(AttributeError, match=f"{name!r} has no attribute 'nothing': it has {known}"):
        package.nothing  # noqa: B018
    with pytest.raises(ImportError, match=f"{name!r} has no attribute 'nothing': it has {known}"):
        exec(f"from {name} import nothing")
    assert not hasattr(package, "nothing")
    assert set(package.__all__) <= set(dir(package))
    assert len(dir(package)) == len(set(dir(package)))


@pytest.mark.parametrize("name", ["fastattn", "fastattn.modules", "fastattn.convert", "fastattn.distributed"])
def test_type_checkers_are_told_the_public_names(name: str) -> None:
    package = importlib.import_module(name)
    tree = ast.parse(Path(package.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    told = {(node.module, alias.asname) for node in block.body for alias in node.names}
    assert sorted(public for _, public in told) == package.__all__
    for module, public in told:
        value = getattr(package, public)
        assert value is (getattr(importlib.import_module(module), public)), public


@pytest.mark.parametrize("name", ["fastattn", "fastattn.ops"])
def test_every_public_name_is_type_checked_as_a_user_has_it(name: str) -> None:
    text = (Path(__file__).parent / "user_types.py").read_text()
    missing = [public for public in importlib.import_module(name).__all__ if public not in text]
    assert missing == []


def test_a_module_that_is_no_public_name_is_imported_all_the_same() -> None:
    found = run("""
        import json
        from fastattn.modules import policies
        from fastattn import validation
        from fastattn.modules import CompressedKVCache, LowRankAttention, Policy
        print(json.dumps([policies.__name__, validation.__name__, issubclass(policies.Knorm, Policy)]))
    """)
    assert found == ["fastattn.modules.policies", "fastattn.validation", True]


def test_conversion_is_reachable_from_the_package_and_loads_transformers_only_when_used() -> None:
    found = run(f"""
        import json, sys
        import torch, fastattn

        names = [name for name in fastattn.convert.__all__ if getattr(fastattn.convert, name) is None]
        loaded = [m for m in {HEAVY} if m in sys.modules]
        print(json.dumps({{"missing": names, "loaded": loaded}}))
    """)
    assert found == {"missing": [], "loaded": []}
