"""A rank that stops in mid-step: every other rank raises, soon, and says what happened."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from fastattn.distributed import context_parallel
from tests._helpers.policy_caches import make
from tests._helpers.ranks import Ranks
from tests.distributed.test_context_parallel import tokens
from tests.distributed.test_tensor_parallel import low_rank, mesh_of_all, spread


def check_context_parallel() -> tuple[str, str, float]:
    cache = context_parallel(make("knorm", 8, num_layers=2), mesh_of_all())
    for layer in range(2):
        cache.attend(layer, *(t[:1].float() for t in tokens(12)))
    cache.attend(0, *(t[:1].float() for t in tokens(1)))
    if dist.get_rank() == 1:
        os._exit(3)  # between the layers of a step
    start = time.monotonic()
    messages = []
    for layer in (1, 1):
        try:
            cache.attend(layer, *(t[:1].float() for t in tokens(1)))
        except RuntimeError as error:
            messages.append(str(error))
    return messages[0], messages[1], time.monotonic() - start


def test_context_parallel_says_that_a_rank_stopped() -> None:
    ranks = Ranks(2, may_die=(1,))
    first, second, seconds = ranks.run(check_context_parallel)[0]
    ranks.stop()
    assert first.startswith("rank 0 got no answer from the other ranks of mesh [0, 1]: one of them stopped")
    assert "the cache is invalid since layer 1 failed with RuntimeError: call reset()" in second
    assert seconds < 60  # the group's timeout is 80 s: a closed connection is noticed before


def check_tensor_parallel() -> str:
    module = spread(low_rank())
    cache = module.make_cache("tova", 8, interval=4)
    with torch.no_grad():
        module(torch.randn(1, 12, 48, dtype=torch.float64), cache=cache)
        if dist.get_rank() == 1:
            module.o_proj.register_forward_pre_hook(lambda *_: os._exit(3))  # after the cache took the token in
        try:
            float(module(torch.randn(1, 1, 48, dtype=torch.float64), cache=cache).sum())  # waits for the all-reduce
        except RuntimeError as error:
            return str(error)
    return "nothing was raised"


def test_tensor_parallel_raises_where_a_rank_stopped() -> None:
    ranks = Ranks(2, may_die=(1,))
    message = ranks.run(check_tensor_parallel)[0]
    ranks.stop()
    assert "onnection" in message or "peer" in message, message  # PyTorch's own words
