"""Settings that every test shares."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# Small tensors: waking threads costs more than they bring, the more so beside other test processes.
torch.set_num_threads(1)

# No wall-clock limits: machines differ and are shared. CI draws the same examples every time, a developer new ones.
settings.register_profile("fastattn", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("ci", parent=settings.get_profile("fastattn"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "fastattn")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where tests/ops runs its operators: cpu or cuda")


def pytest_configure(config: pytest.Config) -> None:
    """Make the asked device the default: what tests construct lies there, and what they draw is moved there."""
    asked = config.getoption("--device")
    if asked == "cpu":
        return
    if asked != "cuda":
        raise pytest.UsageError(f"--device must be cpu or cuda, got {asked}")
    if not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda needs a GPU that PyTorch sees, and torch.cuda.is_available() is False")
    torch.set_default_device(asked)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    device = config.getoption("--device")
    if device == "cpu":
        return
    for item in items:
        if item.get_closest_marker("cpu_only"):
            item.add_marker(pytest.mark.skip(reason=f"looks at what runs on a CPU only, this run is on {device}"))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device that the operator suite runs on."""
    return torch.device(request.config.getoption("--device"))
