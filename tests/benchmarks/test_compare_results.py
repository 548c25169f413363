"""The comparison of two revisions' results finds a bit that differs, and only that."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.compare_results import ROOT, SECTIONS, differences, run
from benchmarks.lib.result_cases._common import Results
from benchmarks.lib.result_cases.driver import SECTIONS as DRIVEN

LAST_BIT = """
_exact = qk_scores

def qk_scores(query, key, *, scale=1.0):
    out = _exact(query, key, scale=scale)
    out[0, 0, 0, 0] = out[0, 0, 0, 0].nextafter(out.new_tensor(float("inf"))) if out.dtype == float32 else 0
    return out

from torch import float32
"""


def test_a_changed_bit_is_found(tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(ROOT / "fastattn", changed / "fastattn", ignore=shutil.ignore_patterns("__pycache__"))
    with (changed / "fastattn" / "ops" / "__init__.py").open("a") as file:
        file.write(LAST_BIT)
    base = run(ROOT, tmp_path / "base", tmp_path / "base", ["operators"])
    here = run(changed, tmp_path / "here", tmp_path / "base", ["operators"])
    found = differences(base, here)
    assert len(base) > 1000
    assert sum(name.startswith("ops.float32.") for name in found) == 12
    assert all(".qk_scores." in name for name in found)


def test_a_name_that_one_revision_lacks_is_named() -> None:
    assert differences({"a": "1", "b": "2"}, {"b": "2", "c": "3"}) == ["a: only in the base", "c: only in this tree"]


def test_digests_tell_values_dtypes_shapes_and_names_apart() -> None:
    results = Results()
    zeros = torch.zeros(2, 3)
    for name, value in {
        "zeros": zeros,
        "negative": -zeros,
        "int": zeros.int(),
        "shape": zeros.T,
        "text": "0",
        "number": 0,
    }.items():
        results.add(name, value)
    assert len(set(results.digests.values())) == len(results.digests) == 6
    results.add("strided", torch.zeros(3, 2).T)
    assert results.digests["strided"] == results.digests["zeros"]
    results.add("dict", {"x": zeros, "y": [zeros]})
    assert {"dict.names", "dict.x", "dict.y.0"} < results.digests.keys()
    with pytest.raises(ValueError, match="name must be new, got 'zeros'"):
        results.add("zeros", zeros)


def test_sections_are_those_of_the_driver() -> None:
    assert tuple(DRIVEN) == SECTIONS
