"""Processes of a gloo group that run checks for tests: started once, they serve one check after another."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

SECONDS = 100  # until a check that does not end fails; a collective that some rank does not reach gives up before
_COLLECTIVE = 80


def _serve(rank: int, ranks: int, store: str, calls: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=_COLLECTIVE)
    )
    while True:
        try:
            check, arguments = calls.recv()
        except EOFError:
            os._exit(0)
        try:
            torch.manual_seed(0)
            calls.send((check(*arguments), None))
        except BaseException:
            calls.send((None, traceback.format_exc()))


class Ranks:
    """``count`` processes of one group.

    Args:
        count: how many.
        may_die: ranks whose end is no failure.
    """

    def __init__(self, count: int, may_die: Sequence[int] = ()) -> None:
        self.count, self.may_die = count, may_die
        self._processes: list[Any] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes = []
        for rank in range(self.count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.count, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []

    def run(self, check: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What ``check(*arguments)`` returns in every process; a failure in any fails the test with its traceback."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((check, arguments))
        answers, left = [None] * self.count, dict(zip(self._pipes, range(self.count), strict=True))
        while left:
            ready = wait(list(left), timeout=SECONDS)
            if not ready:
                self.stop()
                raise AssertionError(f"ranks {sorted(left.values())} gave no answer in {SECONDS} s")
            for pipe in ready:
                rank = left.pop(pipe)  # type: ignore[call-overload]
                self._take(rank, pipe, answers)
        return answers

    def _take(self, rank: int, pipe: Any, answers: Sequence[Any]) -> None:
        try:
            answer, failure = pipe.recv()
        except EOFError:
            if rank in self.may_die:
                return
            self.stop()
            raise AssertionError(f"rank {rank} died") from None
        if failure is not None:
            self.stop()  # its peers may wait for it in a collective
            raise AssertionError(f"rank {rank} failed:\n{failure}")
        answers[rank] = answer  # type: ignore[index]
