"""Do two revisions compute the same bits on a CPU? ``python -m benchmarks.compare_results BASE``.

BASE is checked out beside this tree (the working tree as it is, uncommitted changes included). One and the same driver,
:mod:`benchmarks.lib.result_cases` of this tree, runs in a process of each, on one thread and with fixed seeds, and
gives a digest of every tensor. This tree also loads what the base saved: states of caches and modules, folders of
converted models. Prints how many digests were compared and the names of those that differ; exits with 1 if any does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHOWN = 40
SECTIONS = ("operators", "caches", "low_rank", "generation", "conversion")
# The driver comes from this tree, fastattn from the current folder.
START = """
import sys
from pathlib import Path

sys.path[0], *given = sys.argv[1:]
import benchmarks
sys.path[0] = ""
from benchmarks.lib.result_cases import driver

driver.main(Path(given[0]), Path(given[1]), given[2:])
"""


def run(code: Path, folder: Path, saved: Path, only: list[str]) -> dict[str, str]:
    """Digests of the revision in the folder ``code``.

    Args:
        code: a checkout.
        folder: where its process saves.
        saved: where the process looks for what the base saved.
        only: sections to run; none for all.

    Raises:
        RuntimeError: the driver stopped, or ran other code than asked for.
    """
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-c", START, str(ROOT), str(folder), str(saved), *only]
    status = subprocess.run(command, cwd=code, env=environment, check=False).returncode
    if status:
        raise RuntimeError(f"the driver stopped with exit status {status} on the code in {code}")
    found = json.loads((folder / "digests.json").read_text())
    if Path(found["code"]).resolve() != code.resolve():
        raise RuntimeError(f"the driver must run the code in {code}, it ran that in {found['code']}")
    digests: dict[str, str] = found["digests"]
    return digests


def differences(base: dict[str, str], here: dict[str, str]) -> list[str]:
    """A line for every name whose digest differs or that only one revision has."""
    lines = []
    for name in sorted({*base, *here}):
        if name not in here or name not in base:
            lines.append(f"{name}: only in {'the base' if name in base else 'this tree'}")
        elif base[name] != here[name]:
            lines.append(name)
    return lines


def compare(base: str, only: list[str]) -> tuple[int, list[str]]:
    """How many digests both revisions have, and the differences."""
    with tempfile.TemporaryDirectory() as folder:
        tree, results = Path(folder) / "base", Path(folder) / "results"
        results.mkdir()
        git = ["git", "-C", str(ROOT)]
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(tree), base], check=True)
        try:
            saved = results / "base"
            before, now = run(tree, saved, saved, only), run(ROOT, results / "here", saved, only)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(tree)], check=False)
    return len(before.keys() & now.keys()), differences(before, now)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("base", help="the revision to compare with")
    parser.add_argument("--only", nargs="+", default=[], choices=SECTIONS, help="sections to run")
    parser.add_argument("--all", action="store_true", help=f"name every difference, not the first {SHOWN}")
    given = parser.parse_args()
    count, found = compare(given.base, given.only)
    for line in found if given.all else found[:SHOWN]:
        print(line)
    if len(found) > SHOWN and not given.all:
        print(f"... and {len(found) - SHOWN} more")
    print(f"{count} results compared with {given.base}, {len(found)} differ")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
