"""The examples for several processes, as their docstrings say to run them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["tensor_parallel", "context_parallel"])
def test_two_processes_decode_what_one_does(name: str) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", f"examples.{name}", "--steps", "20"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("rank ")]
    assert sorted(line.split(":")[0] for line in lines) == ["rank 0 of 2", "rank 1 of 2"]
    for line in lines:
        assert "kept tokens equal" in line
        assert float(re.search(r"difference .*?(\d\.\de[-+]\d\d)", line)[1]) < 1e-5
