"""Continuous batching: requests join, fork and leave the rows of one cache, between steps of one compiled graph.

64 requests of different lengths go through 8 rows. A prompt is read in a cache of its own, whose row is then inserted
into a free row of the batch. Every step decodes one token in each active row. Some requests want a second answer from
some token on: their row is copied to another one. A row that is done is emptied. Each answer is compared with the one
that its request gets alone.

    python -m examples.continuous_batching
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from examples import plain_pytorch

POLICY, BUDGET, INTERVAL = "key_diff", 24, 8


@dataclass
class Request:
    """What is asked, and what has been answered.

    Attributes:
        prompt: bytes ``[1, T]``.
        tokens: how many to write.
        fork_at: here a second answer goes its own way, with the second likeliest token; None for one answer.
        answers: the tokens of each answer so far.
    """

    prompt: Tensor
    tokens: int
    fork_at: int | None = None
    answers: list[list[int]] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows that it takes."""
        return 1 if self.fork_at is None else 2


class Server:
    """Decodes requests in the rows of one cache.

    Attributes:
        step: the model, or it compiled: the same graph from the first step to the last.
        steps: how often it ran.
        tokens: how many tokens it was fed, over all rows.
    """

    def __init__(self, model: plain_pytorch.Model, step: Any, rows: int) -> None:
        self.model, self.step = model, step
        self.cache = model.make_cache(POLICY, BUDGET, rows, INTERVAL)
        self.reader = model.make_cache(POLICY, BUDGET, 1, INTERVAL)  # reads the prompts
        self.queue: deque[Request] = deque()
        self.free = list(range(rows))
        self.active: dict[int, tuple[Request, int]] = {}  # row -> request, and which of its answers
        self.reserved: dict[int, int] = {}  # row -> the row that its request's second answer will take
        self.next = torch.zeros(rows, 1, dtype=torch.int64)
        self.steps = self.tokens = 0

    @torch.no_grad()
    def run(self, requests: list[Request]) -> None:
        """Answer all of them."""
        self.queue.extend(requests)
        while self.queue or self.active:
            while self.queue and self.queue[0].rows <= len(self.free):
                self._join(self.queue.popleft())
            self._step()

    def _join(self, request: Request) -> None:
        row = self.free.pop()
        self.reader.reset()
        logits = self.model(request.prompt, self.reader)[0, -1]
        self.cache.insert(torch.tensor([row]), self.reader)
        self.active[row] = (request, 0)
        request.answers.append([])
        if request.fork_at is not None:
            self.reserved[row] = self.free.pop()
        self._take(row, logits)

    def _step(self) -> None:
        mask = torch.zeros(len(self.next), 1, dtype=torch.bool)
        mask[list(self.active)] = True
        logits = self.step(self.next, self.cache, mask)[:, -1]
        self.steps += 1
        self.tokens += len(self.active)
        for row in list(self.active):
            self._take(row, logits[row])

    def _take(self, row: int, logits: Tensor) -> None:
        """The next token of the answer in ``row``, which may fork there or be over."""
        request, answer = self.active[row]
        first, second = logits.topk(2).indices.tolist()
        if answer == 0 and request.fork_at == len(request.answers[0]):
            self._fork(row, second)
        self._write(row, first)

    def _fork(self, row: int, token: int) -> None:
        other = self.reserved.pop(row)
        index = torch.arange(len(self.next))
        index[other] = row
        self.cache.reorder(index)
        request, _ = self.active[row]
        self.active[other] = (request, 1)
        request.answers.append(list(request.answers[0]))
        self._write(other, token)

    def _write(self, row: int, token: int) -> None:
        request, answer = self.active[row]
        request.answers[answer].append(token)
        self.next[row] = token
        if len(request.answers[answer]) == request.tokens:
            self.cache.reset(torch.tensor([row]))
            del self.active[row]
            self.free.append(row)


@torch.no_grad()
def alone(model: plain_pytorch.Model, request: Request, budget: int = BUDGET) -> list[list[int]]:
    """The answers of ``request`` with nothing beside it."""
    cache = model.make_cache(POLICY, budget, 1, INTERVAL)
    todo = [(cache, model(request.prompt, cache)[0, -1], [])]
    answers: list[list[int]] = []
    while todo:
        cache, logits, written = todo.pop()
        while len(written) < request.tokens:
            token, second = logits.topk(2).indices.tolist()
            if not answers and len(written) == request.fork_at:
                other = cache.select(torch.tensor([0]))
                fork = [*written, second]
                logits_of_fork = None if len(fork) == request.tokens else model(torch.tensor([[second]]), other)[0, -1]
                todo.append((other, logits_of_fork, fork))
            written.append(token)
            if len(written) < request.tokens:
                logits = model(torch.tensor([[token]]), cache)[0, -1]
        answers.append(written)
    return answers


def make_requests(count: int, text: Tensor, seed: int = 0) -> list[Request]:
    """Prompts of 5 to 90 bytes from ``text [N]``, answers of 1 to 40 bytes, every fourth request with two."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    requests = []
    for index in range(count):
        length, tokens = draw(5, 90), draw(1, 40)
        start = draw(0, len(text) - length)
        fork_at = draw(0, tokens - 1) if index % 4 == 3 else None
        requests.append(Request(text[None, start : start + length], tokens, fork_at))
    return requests


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--train", type=int, default=100, help="training steps of the model first (default 100)")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    data = plain_pytorch.documentation()
    model = plain_pytorch.Model()
    plain_pytorch.train(model, data, options.train)
    model = model.double().eval()  # so that rounding decides between no two tokens
    requests = make_requests(options.requests, data)
    server = Server(model, model if options.eager else torch.compile(model, fullgraph=True), options.rows)
    start = time.perf_counter()
    if options.eager:
        server.run(requests)
    else:
        server.run(requests[: options.rows])  # compiles
        with torch._dynamo.config.patch(error_on_recompile=True):  # from here on that is an error
            server.run(requests[options.rows :])
    seconds = time.perf_counter() - start
    different = sum(request.answers != alone(model, request) for request in requests)
    answers = sum(len(request.answers) for request in requests)
    print(f"{len(requests)} requests, {answers} answers, {options.rows} rows, {server.steps} steps, {seconds:.1f} s")
    active = server.tokens / server.steps / options.rows
    print(f"{active:.0%} of the rows active; {different} requests differ from themselves alone")
    if not options.eager:
        print("0 recompilations after the first step")


if __name__ == "__main__":
    main()
