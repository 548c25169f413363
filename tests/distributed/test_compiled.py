"""The tensor-parallel decode step as one graph: collectives inside it, and no recompilation over evictions."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo

from tests._helpers.ranks import Ranks
from tests.distributed.test_fully_sharded import Model, my_rows, sharded, train
from tests.distributed.test_tensor_parallel import low_rank, small, spread

pytestmark = pytest.mark.compile


def check_step(name: str) -> int:
    torch._dynamo.reset()
    module = spread(low_rank())
    eager, compiled = (module.make_cache(small(name), 12, interval=3) for _ in range(2))
    step = torch.compile(module, fullgraph=True)
    prompt = torch.randn(1, 14, 48, dtype=torch.float64)
    with torch.no_grad():
        module(prompt, cache=eager)
        module(prompt, cache=compiled)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(10):  # two compressions and more
                hidden = torch.randn(1, 1, 48, dtype=torch.float64)
                expected = module(hidden, cache=eager)
                got = step(hidden, cache=compiled)
                assert (expected - got).abs().max() < 1e-10
                assert torch.equal(eager.positions(0), compiled.positions(0))
    return int(compiled.lengths(0).max())


@pytest.mark.parametrize("name", ["key_diff", "tova"])
def test_a_compiled_step_over_two_ranks(two_ranks: Ranks, name: str) -> None:
    assert max(two_ranks.run(check_step, name)) <= 15


def check_training() -> None:
    torch._dynamo.reset()
    losses = []
    for compiled in (False, True):
        model = Model(torch.float64)
        if compiled:
            model.layers = torch.nn.ModuleList(torch.compile(layer, fullgraph=True) for layer in model.layers)
        model = sharded(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append(torch.stack(train(model, optimizer, range(3), torch.float64, my_rows())))
    assert (losses[0] - losses[1]).abs().max() < 1e-10


def test_compiled_layers_train_fully_sharded(two_ranks: Ranks) -> None:
    two_ranks.run(check_training)
