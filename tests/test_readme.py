"""Every Python snippet of the README runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parent.parent / "README.md"
MODEL = '"HuggingFaceTB/SmolLM2-135M-Instruct"'


def snippets() -> list[pytest.param]:
    found, heading = [], "top"
    pattern = re.compile(r"^#+ (?P<heading>[^\n]+)$|^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
    for match in pattern.finditer(README.read_text()):
        if match["heading"]:
            heading = match["heading"]
        else:
            line = README.read_text()[: match.start()].count("\n") + 1
            marks = [pytest.mark.transformers] if "transformers" in match["code"] else []
            found.append(pytest.param("\n" * line + match["code"], id=heading.replace(" ", "-").lower(), marks=marks))
    return found


@pytest.mark.parametrize("code", snippets())
def test_snippet_runs(code: str) -> None:
    torch.manual_seed(0)
    if MODEL in code:  # the same model, from a package instead of a download
        from examples import _smollm2

        code = code.replace(MODEL, repr(str(_smollm2.folder())))
    exec(compile(code, str(README), "exec"), {"__name__": "readme"})


def test_readme_has_the_snippets_that_are_tested() -> None:
    assert README.read_text().count("```python") == len(snippets()) >= 5
