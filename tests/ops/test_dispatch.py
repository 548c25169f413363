"""How an operator finds its device."""

from __future__ import annotations

import pytest
import torch

from fastattn.ops import _register


@pytest.mark.parametrize("nested", [False, True])
def test_the_device_is_that_of_the_first_tensor_also_inside_a_list(nested: bool) -> None:
    tensor = torch.empty(1, device="meta")
    assert _register._device_of([[tensor] if nested else tensor, 0.5]).type == "meta"
