"""Every Python snippet of the README and of docs/ runs as it stands, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fastattn.modules.policies import NAMED_POLICIES

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))
MODEL = '"HuggingFaceTB/SmolLM2-135M-Instruct"'


def snippets(page: Path) -> list[pytest.param]:
    found, heading, text = [], "top", page.read_text()
    pattern = re.compile(r"^#+ (?P<heading>[^\n]+)$|^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
    for match in pattern.finditer(text):
        if match["heading"]:
            heading = match["heading"]
        else:
            code = "\n" * (text[: match.start()].count("\n") + 1) + match["code"]
            marks = [pytest.mark.transformers] if "transformers" in code else []
            found.append(pytest.param(page, code, id=heading.replace(" ", "-").lower(), marks=marks))
    return found


@pytest.mark.parametrize(("page", "code"), [snippet for page in PAGES for snippet in snippets(page)])
def test_snippet_runs(page: Path, code: str) -> None:
    torch.manual_seed(0)
    if MODEL in code:  # the same model, from a package instead of a download
        from examples import smollm2

        code = code.replace(MODEL, repr(str(smollm2.folder())))
    exec(compile(code, str(page), "exec"), {"__name__": "readme"})


def test_the_table_of_policies_is_the_registry() -> None:
    rows = [f'| `"{named.name}"` | {named.keeps} | {named.source} |' for named in NAMED_POLICIES.values()]
    table = re.search(r"^\| name \| keeps \| source \|\n\|[-|]+\|\n((?:\|.*\n)+)", README.read_text(), re.MULTILINE)
    assert table is not None
    assert table[1].splitlines() == rows


def test_pages_have_the_snippets_that_are_tested() -> None:
    for page in PAGES:
        assert page.read_text().count("```python") == len(snippets(page)), page
    assert len(snippets(README)) >= 5


def test_readme_is_short_and_begins_with_a_figure() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 200
    assert any(line.startswith("![") for line in lines[:30])


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for target in targets:
        if target.startswith(("https:", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
