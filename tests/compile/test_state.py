"""What compiling leaves alone, and how the cache's buffers look to a compiled graph."""

from __future__ import annotations

import copy
import logging
import os
import warnings

import pytest
import torch

from tests._helpers.compiling import TinyModel, counting

pytestmark = pytest.mark.compile


def run_once(backend) -> None:
    torch.manual_seed(0)
    model = TinyModel().eval()
    cache = model.make_cache("expected_attention")
    with torch.no_grad():
        step = torch.compile(model, fullgraph=True, backend=backend)
        for i in range(3):
            step(torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), i), cache)


def test_nothing_global_changes_and_nothing_is_logged(caplog):
    import torch._dynamo
    import torch._inductor.config

    with counting():
        run_once("aot_eager")  # what torch itself sets up on first use is not ours
        configs = (torch._dynamo.config, torch._inductor.config, torch._functorch.config)
        before = [copy.deepcopy(config.save_config_portable()) for config in configs]
        environment, filters = dict(os.environ), list(warnings.filters)
        threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
        with caplog.at_level(logging.INFO), warnings.catch_warnings():
            warnings.simplefilter("error")
            run_once("aot_eager")
        assert [config.save_config_portable() for config in configs] == before
    assert dict(os.environ) == environment
    assert list(warnings.filters) == filters
    assert (torch.get_num_threads(), torch.get_default_dtype()) == (threads, dtype)
    assert torch.is_grad_enabled()
    assert [record.getMessage() for record in caplog.records if record.name.startswith("fastattn")] == []


def test_buffers_have_static_addresses_and_counters_are_tensors():
    """CUDA graphs are skipped for mutated inputs unless these are known to stay where they are."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._guards import TracingContext

    seen = {}

    def compiler(graph, inputs):
        context = TracingContext.get()
        seen["static"] = set(context.fw_metadata.static_input_indices)
        seen["inputs"] = inputs
        return graph.forward

    with counting():
        run_once(aot_autograd(fw_compiler=compiler))
    fed = [i for i, value in enumerate(seen["inputs"]) if i not in seen["static"]]
    # What is not static is what each step brings: its token and its position. No integer counter among them.
    assert all(isinstance(value, torch.Tensor) for value in seen["inputs"])
    assert [tuple(seen["inputs"][i].shape) for i in fed] == [(1, 1), (1, 1)]
