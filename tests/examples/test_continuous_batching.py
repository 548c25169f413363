"""Requests that join, fork and leave the rows of one cache get the answers that they get alone."""

from __future__ import annotations

import pytest
import torch

from examples import continuous_batching, plain_pytorch
from tests._helpers.compiling import counting, no_recompiles


@pytest.mark.compile
def test_every_request_gets_its_own_answers_from_one_compiled_step() -> None:
    torch.manual_seed(0)
    model = plain_pytorch.Model().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)  # else every byte repeats itself, whatever was cached
    requests = continuous_batching.make_requests(24, torch.randint(256, (500,)))
    assert sum(request.fork_at is not None for request in requests) == 6
    with counting() as counts:
        step = torch.compile(model, fullgraph=True, backend="aot_eager")
        server = continuous_batching.Server(model, step, rows=5)
        server.run(requests[:2])
        with no_recompiles():
            server.run(requests[2:])
        assert (counts.read().graphs, counts.breaks) == (1, 0)
    assert sorted(server.free) == list(range(5))
    assert server.tokens / server.steps > 2  # rows were in use together
    without_eviction = 0
    for request in requests:
        assert len(request.answers) == request.rows
        assert request.answers == continuous_batching.alone(model, request)
        without_eviction += request.answers == continuous_batching.alone(model, request, budget=200)
    assert without_eviction < 20  # else it would not matter what is in the cache
