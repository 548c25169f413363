"""Settings that every test shares."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

# Small tensors: waking threads costs more than they bring, the more so beside other test processes.
torch.set_num_threads(1)

# No wall-clock limits: machines differ and are shared. CI draws the same examples every time, a developer new ones.
settings.register_profile("fastattn", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("ci", parent=settings.get_profile("fastattn"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "fastattn")
