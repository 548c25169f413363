"""The operator suite on any device: what tests draw is drawn on the CPU and moved, whatever the default device is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests._helpers import draw
from tests.ops import test_attention, test_decode, test_latent

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.cpu_only
@pytest.mark.parametrize("calls", [test_attention.calls, test_decode.calls, test_latent.calls, test_latent.wide_calls])
def test_inputs_are_constructed_under_any_default_device(calls) -> None:
    @settings(max_examples=25, database=None, derandomize=True)
    @given(data=st.data())
    def construct(data: st.DataObject) -> None:
        with torch.device("meta"):
            drawn = data.draw(calls())
        tensors = [value for value in drawn if isinstance(value, torch.Tensor)]
        assert tensors
        assert all(tensor.device.type == "meta" for tensor in tensors)

    construct()


def test_draws_land_on_the_default_device() -> None:
    def drawn() -> list[torch.Tensor]:
        return [draw.normal(3, 4, seed=5), draw.uniform(7), draw.integers(0, 9, 7), draw.permutation(9, 5)]

    plain = drawn()
    with torch.device("meta"):
        moved = drawn()
    for ours, theirs in zip(plain, moved, strict=True):
        assert theirs.device.type == "meta"
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


def test_the_device_is_the_default(device: torch.device) -> None:
    assert torch.empty(1).device.type == draw.normal(1).device.type == device.type


@pytest.mark.cpu_only
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: asking for one is no error")
@pytest.mark.parametrize(
    ("asked", "says"), [("cuda", "needs a GPU that PyTorch sees"), ("tpu", "must be cpu or cuda, got tpu")]
)
def test_a_device_that_is_not_there_is_refused_in_one_sentence(asked: str, says: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "tests/ops/test_qk.py", "--device", asked]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 4
    assert says in run.stderr
    assert "Traceback" not in run.stdout + run.stderr
