"""The parts of a device check: processes of their own, each with a time limit, and the file of lines they write."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LINES = "device_check.jsonl"


@dataclass(frozen=True)
class Part:
    """One process of the check: ``step`` and ``name`` say which, ``timeout`` in seconds ends it."""

    step: str
    name: str
    command: tuple[str, ...]
    timeout: float
    kernel: str = ""  # the operator that is not timed where this part fails


def append(out: Path, **line: Any) -> None:
    """Add one line to the lines of ``out`` in one write, so that several processes may do it at a time."""
    data = (json.dumps(line) + "\n").encode()
    file = os.open(out / LINES, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, data)
    finally:
        os.close(file)


def read(out: Path) -> list[dict[str, Any]]:
    """The lines of ``out`` so far. A line that an interruption cut off is left out."""
    lines = []
    for line in (out / LINES).read_text().splitlines() if (out / LINES).exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return lines


class _Running:
    """A part's process, in a session of its own so that it ends with all that it started."""

    def __init__(self, part: Part, environment: dict[str, str]) -> None:
        self.part, self.begin = part, time.monotonic()
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 (closed in finish)
        self.process = subprocess.Popen(
            part.command,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def finish(self, out: Path, cut: str | None) -> None:
        """Write how the process ended: a line of its own where the checks' lines do not tell."""
        self.output.seek(0)
        said = self.output.read().decode(errors="replace").strip().splitlines()
        self.output.close()
        code = self.process.returncode
        error = cut
        if cut is None and code < 0:
            error = f"ended by signal {-code} ({signal.Signals(-code).name})"
        elif cut is None and code:
            told = any(line["part"] == self.part.name and line.get("error") for line in read(out))
            error = None if told else f"ended with exit code {code}: {' | '.join(said[-3:])[-300:]}"
        seconds = round(time.monotonic() - self.begin, 2)
        line = {"step": self.part.step, "part": self.part.name, "kernel": self.part.kernel, "case": "the whole process"}
        append(out, **line, error=error, seconds=seconds, ended=True)
        if error:
            print(f"FAILED  {self.part.step} {self.part.name}: {error}", flush=True)


def run(parts: Sequence[Part], out: Path, workers: int, deadline: float = float("inf"), small: bool = False) -> None:
    """Run ``parts``, ``workers`` at a time. Whatever one of them does, the others run.

    Parts that have not begun at ``deadline`` (of :func:`time.monotonic`) are reported as not run.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} if small else dict(os.environ)
    waiting, running = list(parts), []
    try:
        while waiting or running:
            now = time.monotonic()
            while waiting and len(running) < workers and now < deadline:
                running.append(_Running(waiting.pop(0), environment))
            if now >= deadline:
                for part in waiting:
                    line = {"step": part.step, "part": part.name, "kernel": part.kernel, "case": "the whole process"}
                    append(out, **line, error="not run: the minutes are over", seconds=0.0, ended=True)
                waiting = []
            for each in list(running):
                cut = None
                if now - each.begin > each.part.timeout:
                    cut = f"took more than {each.part.timeout:g} s"
                elif now >= deadline:
                    cut = "not finished: the minutes are over"
                if each.process.poll() is None and cut is None:
                    continue
                if each.process.poll() is None:
                    each.kill()
                else:
                    cut = None
                each.finish(out, cut)
                running.remove(each)
            time.sleep(0.05)
    finally:
        for each in running:  # only after an interruption
            each.kill()
