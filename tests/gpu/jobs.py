"""Jobs of rallyrun and torchrun whose workers report events as lines of JSON."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from benchmarks.case import BenchError
from benchmarks.children import ROOT, Child, Children, clean_environment

from rallypoint.base.process_table import process_table
from tests.gpu.machine import environment

RALLYRUN = (sys.executable, "-m", "rallypoint.run")
RALLYCTL = (sys.executable, "-m", "rallypoint.cli.rallyctl")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
START = 120.0
"""Seconds for the first steps: imports of torch, CUDA contexts, what is preloaded."""
RESUME = 90.0
_EVENT = re.compile(r'\{"event": .*\}')
_MARK = "RALLYPOINT_GPU_TEST"


def program(name: str) -> str:
    """The path of a worker's program."""
    return str(ROOT / "tests" / "gpu" / "programs" / f"{name}.py")


class Done(NamedTuple):
    """A command that has ended."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def events(self) -> list[dict[str, Any]]:
        return events_of(self.out)


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(found) for found in _EVENT.findall(text)]


def run(
    command: Sequence[str], timeout: float = START, env: Mapping[str, str] | None = None, cwd: str | None = None
) -> Done:
    """Run a command to its end, and end all that it leaves; one that takes too long is stopped (exit code -1)."""
    mark = uuid.uuid4().hex
    variables = {**clean_environment(), **environment(), **(env or {}), _MARK: mark}
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=variables,
        cwd=cwd or ROOT,
        start_new_session=True,
    )
    late = False
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        late = True
        process.terminate()
        try:
            out, err = process.communicate(timeout=20.0)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = b"", b""
    finally:
        _end_all(mark)
    if late and process.poll() is None:
        process.wait()
    code = -1 if late else process.returncode
    return Done(code, out.decode(errors="replace"), err.decode(errors="replace"), time.monotonic() - began)


def _end_all(mark: str) -> None:
    wanted = f"{_MARK}={mark}".encode()
    for pid in process_table():
        with suppress(OSError):
            with open(f"/proc/{pid}/environ", "rb") as file:
                if wanted not in file.read().split(b"\0"):
                    continue
            os.kill(pid, signal.SIGKILL)


class Job:
    """A job that runs; `pids` are its workers' by global rank, as they last told."""

    def __init__(self, children: Children, agent: Child) -> None:
        self.children, self.agent = children, agent
        self.pids: dict[int, int] = {}
        self.seen: list[dict[str, Any]] = []

    def event(self, name: str, seconds: float) -> tuple[float, dict[str, Any]]:
        """The next event of this name, and when it came. Raises BenchError: it does not come in time."""
        deadline = time.monotonic() + seconds
        while True:
            line = self.children.next_line(deadline, f"the event {name!r}")
            found = _EVENT.search(line.text)
            if found is None:
                continue
            event: dict[str, Any] = json.loads(found[0])
            self.seen.append(event)
            if event["rank"] >= 0:
                self.pids[event["rank"]] = event["pid"]
            if event["event"] == name:
                return line.at, event

    def step(self, number: int, seconds: float = START) -> dict[str, Any]:
        """The first step from this one on. Raises BenchError."""
        while True:
            event = self.event("step", seconds)[1]
            if event["step"] >= number:
                return event

    def next_step(self, since: float) -> float:
        """Seconds from a moment to the first step finished in a round that began later. Raises BenchError."""
        self.event("training", RESUME)
        return self.event("step", RESUME)[0] - since

    def until_written(self, text: str, times: int = 1, seconds: float = START) -> None:
        """Read on until the agent has written this to standard error so many times. Raises BenchError."""
        deadline = time.monotonic() + seconds
        while not self.agent.has_written(text, times):
            if time.monotonic() > deadline:
                raise BenchError(f"{text!r} was not written within {seconds:.0f} s; {self.agent.last_words()}")
            self.event("step", RESUME)


@contextmanager
def running(command: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[Job]:
    """A job, for as long as the block lasts."""
    with Children() as children:
        yield Job(children, children.start(" ".join(command[2:4]), [*command], {**environment(), **(env or {})}))
