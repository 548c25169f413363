"""Imports go downward and never in a circle, and files and functions stay short enough to read.

Imports are read from the source, so that those inside functions and under TYPE_CHECKING count as well.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("fastattn", "benchmarks", "examples", "tests")
LONGEST_FILE, LONGEST_FUNCTION = 400, 60

# From the bottom up. A layer may import itself and those in rows below, not its neighbors in a row. A module belongs to
# the layer with the longest name that it begins with.
LAYERS = (
    # argument checks; public names loaded on first use; the definition of quantised storage
    ("fastattn.validation", "fastattn._lazy", "fastattn.ops.reference_codes"),
    ("fastattn.ops._", "fastattn.ops.reference"),  # what operators share; their definitions
    ("fastattn.ops.cpu", "fastattn.ops.triton"),
    ("fastattn.ops",),  # the public functions
    ("fastattn.modules",),
    ("fastattn.distributed",),
    ("fastattn.integrations",),
    ("fastattn.convert",),
    ("fastattn.advice", "fastattn.native"),
    ("fastattn",),  # the names that it exports
    ("benchmarks", "examples", "tests"),
)
RANKS = {name: rank for rank, row in enumerate(LAYERS) for name in row}
MIXED = {"benchmarks", "examples", "tests"}  # what stands above fastattn may use each other
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def module_name(path: Path, root: Path = ROOT) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, known: set[str], root: Path = ROOT) -> Iterator[tuple[int, str]]:
    """Line and name of every module among ``known`` that the file imports, wherever in the file.

    ``from package import name`` counts as ``package.name`` where that is a module, else as ``package``.
    """
    package = module_name(path, root).split(".")
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            names = [full if (full := f"{source}.{alias.name}") in known else source for alias in node.names]
        for name in dict.fromkeys(names):
            if name in known:
                yield node.lineno, name


def graph(paths: list[Path], root: Path = ROOT) -> dict[str, dict[str, int]]:
    """Module -> the modules that it imports -> the line."""
    known = {module_name(path, root) for path in paths}
    return {module_name(path, root): {name: line for line, name in imported(path, known, root)} for path in paths}


def layer_of(module: str) -> str:
    """The layer of a module; one without a place in ``LAYERS`` is an error."""
    found = [name for name in RANKS if (module + ".").startswith(name if name.endswith("_") else f"{name}.")]
    layer = max(found, key=len, default="")
    if layer == "" or (layer == "fastattn" and module != "fastattn"):
        raise AssertionError(f"{module} has no layer: give it a place in LAYERS")
    return layer


def upward(edges: dict[str, dict[str, int]]) -> list[str]:
    """Imports that do not go downward."""
    wrong = []
    for module, targets in edges.items():
        layer = layer_of(module)
        for target, line in targets.items():
            below = layer_of(target)
            if below != layer and RANKS[below] >= RANKS[layer] and not {layer, below} <= MIXED:
                wrong.append(f"{module}:{line} ({layer}) imports {target} ({below})")
    return wrong


def circles(edges: dict[str, dict[str, int]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or not."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(edges[start])
        while todo:
            module = todo.pop()
            if module not in seen:
                seen.add(module)
                todo += edges[module]
        return seen

    below = {module: reached(module) for module in edges}
    groups = {tuple(sorted(other for other in below[m] if m in below[other])) for m in edges if m in below[m]}
    return [list(group) for group in sorted(groups)]


def is_kernel(path: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    in_triton = path.is_relative_to(ROOT / "fastattn" / "ops" / "triton")
    return in_triton and any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def long_functions(path: Path) -> list[str]:
    """Functions of more than ``LONGEST_FUNCTION`` lines, their docstring not counted; kernels may be longer."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or is_kernel(path, node):
            continue
        lines = (node.end_lineno or 0) - node.lineno + 1
        if ast.get_docstring(node) is not None:
            lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
        if lines > LONGEST_FUNCTION:
            found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines} lines")
    return found


def test_imports_go_downward() -> None:
    wrong = upward(graph(FILES))
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other() -> None:
    found = circles(graph(FILES))
    assert not found, "\n".join(" <-> ".join(group) for group in found)


def test_files_and_functions_are_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in FILES}
    long = [f"{path.relative_to(ROOT)}: {lines} lines" for path, lines in lengths.items() if lines > LONGEST_FILE]
    long += [line for path in FILES for line in long_functions(path)]
    assert not long, "\n".join(long)


def test_every_file_says_what_it_holds() -> None:
    silent = [str(path.relative_to(ROOT)) for path in FILES if not ast.get_docstring(ast.parse(path.read_text()))]
    silent = [path for path in silent if path.startswith("fastattn")]
    assert not silent, f"must begin with a docstring: {', '.join(silent)}"


def named_paths(page: Path) -> Iterator[str]:
    """Paths from the root that a page names in code type, with what stands in braces written out."""
    for name in re.findall(r"`((?:fastattn|benchmarks|examples|tests)/[^`\s]*)`", page.read_text()):
        before, brace, rest = name.partition("{")
        if not brace:
            yield name
            continue
        inside, _, after = rest.partition("}")
        yield from (f"{before}{part}{after}" for part in inside.split(","))


def test_architecture_names_files_that_exist() -> None:
    named = [name for name in named_paths(ROOT / "docs" / "architecture.md") if "NAME" not in name]
    assert len(named) > 30
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing, f"docs/architecture.md names what is not there: {', '.join(missing)}"


def test_the_rule_finds_what_it_must(tmp_path: Path) -> None:
    """On a small tree: an import upward inside a function, a circle under TYPE_CHECKING, a neighbor, a relative one."""
    sources = {
        "fastattn/__init__.py": "def __getattr__(name):\n    from fastattn import convert, ops\n",
        "fastattn/validation.py": "def check():\n    from fastattn.modules.cache import Cache\n",
        "fastattn/ops/__init__.py": "from fastattn.ops.cpu import decode\n",
        "fastattn/ops/cpu/__init__.py": "",
        "fastattn/ops/cpu/decode.py": "import fastattn.ops.triton\nfrom ... import validation\n",
        "fastattn/ops/triton/__init__.py": "",
        "fastattn/modules/__init__.py": "",
        "fastattn/modules/cache.py": "from fastattn import ops, validation\nfrom .update import run\n",
        "fastattn/modules/update.py": "if TYPE_CHECKING:\n    from fastattn.modules.cache import Cache\n",
        "fastattn/convert/__init__.py": "from fastattn import Policy\n",
    }
    for name, source in sources.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    edges = graph([tmp_path / name for name in sources], tmp_path)
    assert edges["fastattn.ops.cpu.decode"] == {"fastattn.ops.triton": 1, "fastattn.validation": 2}
    assert sorted(upward(edges)) == [
        "fastattn.convert:1 (fastattn.convert) imports fastattn (fastattn)",
        "fastattn.ops.cpu.decode:1 (fastattn.ops.cpu) imports fastattn.ops.triton (fastattn.ops.triton)",
        "fastattn.validation:2 (fastattn.validation) imports fastattn.modules.cache (fastattn.modules)",
    ]
    cache = {"fastattn.modules.cache", "fastattn.modules.update", "fastattn.ops", "fastattn.ops.cpu.decode"}
    assert [set(group) for group in circles(edges)] == [
        {"fastattn", "fastattn.convert"},
        cache | {"fastattn.validation"},
    ]
    with pytest.raises(AssertionError, match=r"fastattn\.other has no layer"):
        layer_of("fastattn.other")
    assert layer_of("fastattn.ops._register") == "fastattn.ops._"
    assert layer_of("fastattn.modules.low_rank.paths") == "fastattn.modules"
