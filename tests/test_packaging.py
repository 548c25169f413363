"""What GitHub, package indexes and citation tools read agrees with what the project is."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

import fastattn

ROOT = Path(__file__).parent.parent
yaml = pytest.importorskip("yaml", reason="PyYAML comes with transformers")
YAML = [*sorted((ROOT / ".github").rglob("*.yml")), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"]


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_yaml_is_a_mapping(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def steps(workflow: str) -> list[str]:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / workflow).read_text())["jobs"]
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


def test_workflows_call_targets_that_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = [re.match(r"make ([\w-]+)", run) for run in [*steps("test.yml"), *steps("release.yml")]]
    names = {match[1] for match in called if match}
    assert names == {"test", "test-without-triton", "test-lm-eval", "dist"}
    assert names <= targets


def test_every_python_that_is_claimed_is_tested() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]
    project = (ROOT / "pyproject.toml").read_text()
    claimed = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert claimed == jobs["linux"]["strategy"]["matrix"]["python"]
    assert f'requires-python = ">={claimed[0]}"' in project


def test_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == fastattn.__version__
    assert citation["license"] == "Apache-2.0"
    policies = {reference["identifiers"][0]["value"] for reference in citation["references"]}
    table = re.findall(r"\| arXiv (\d+\.\d+) \|", (ROOT / "README.md").read_text())
    assert {f"arXiv:{number}" for number in table} <= policies


def test_what_the_library_imports_is_declared() -> None:
    imported = set()
    for path in (ROOT / "fastattn").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(str(node.module).split(".")[0])
    project = (ROOT / "pyproject.toml").read_text()
    library = project[project.index("dependencies = [") : project.index("dev = [")]
    declared = set(re.findall(r'"([\w-]+)(?:\[\w+\])?[><=]', library))
    assert imported - set(sys.stdlib_module_names) - {"fastattn"} <= declared
