"""One of many workers of one node killed, until the last new one runs; the worker is a small program in C.

What is timed is the launcher: workers say by a time of their own, in a file, when they run, so that neither
an interpreter nor a pipe is part of it. Its processor time is that of the agent and of all that it runs beside its
workers, from the kill until the last new worker runs.
"""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.case import OURS, THEIRS, BenchError, Budget, Case, Row, Settings, Turns, in_turn, row
from benchmarks.children import ROOT, Child, Children, descendants, launcher
from benchmarks.jobs import COMMANDS
from benchmarks.system import ProcessClock

_SOURCE = ROOT / "benchmarks" / "programs" / "worker.c"
_NOTE = struct.Struct("=qq")
_TIMEOUT = 90.0  # seconds for all workers to run
_LOOK = 0.002  # seconds between looks at the notes
_SETTLE = 0.5  # seconds until a launcher has nothing to do but watch


@dataclass(frozen=True, slots=True)
class _Restart:
    seconds: float
    processor: float
    """Milliseconds a worker."""


@dataclass(frozen=True, slots=True)
class _Note:
    """What a worker has noted: its pid, and since when it runs, in seconds on the monotonic clock."""

    pid: int
    at: float


def _run(settings: Settings) -> list[Row]:
    rows = []
    for workers, busy in ((8, False),) if settings.quick else ((64, False), (256, False), (256, True)):
        what = f"one of {workers} workers in C killed, to the last new one{', busy processors' * busy}"
        sides = {side: partial(_restart, side, workers, busy) for side in (OURS, THEIRS)}
        turns = in_turn(what, settings.rounds, sides)
        seconds = {side: [each.seconds for each in all_] for side, all_ in turns.results.items()}
        processor = {side: [each.processor for each in all_] for side, all_ in turns.results.items()}
        rows.append(row(what, "s", Turns(seconds, turns.failures), Budget(0.7 if busy else 0.4)))
        if not busy:
            title = f"the same, {workers} workers: the launcher's processor time a worker"
            rows.append(row(title, "ms", Turns(processor, turns.failures), Budget(1.0)))
    return rows


def _restart(side: str, workers: int, busy: bool) -> _Restart:
    with ExitStack() as stack:
        programs, folder = (
            stack.enter_context(tempfile.TemporaryDirectory(prefix="rallybench-", dir=where))
            for where in (None, _memory())
        )
        children = stack.enter_context(Children())
        notes = Path(folder) / "notes"
        notes.write_bytes(bytes(_NOTE.size * workers))
        options = ["--standalone", f"--nproc-per-node={workers}", "--max-restarts=1", "--no-python"]
        command = [launcher(COMMANDS[side]), *options, _built(programs), str(notes)]
        agent = children.start(COMMANDS[side], command, {"TMPDIR": folder})  # for the folder of each worker
        old = _wait(agent, notes)
        if busy:
            for number in range(os.cpu_count() or 1):
                children.start(f"load {number}", [sys.executable, "-c", "while True: pass"])
        time.sleep(_SETTLE)
        pids = {each.pid for each in old}
        clocks = [ProcessClock(pid) for pid in (agent.pid, *descendants(agent.pid)) if pid not in pids]
        before, killed_at = _used(clocks), time.monotonic()
        os.kill(old[1].pid, signal.SIGKILL)
        new = _wait(agent, notes, pids)
        return _Restart(max(each.at for each in new) - killed_at, (_used(clocks) - before) * 1e3 / workers)


def _memory() -> str | None:
    """Where a new folder is no work of a disk: that depends on how many were removed a moment ago."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _built(folder: str) -> str:
    """The program. Raises BenchError where there is no compiler that can make it."""
    target = f"{folder}/worker"
    try:
        subprocess.run(["cc", "-O2", "-o", target, str(_SOURCE)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BenchError(f"its worker is in C, and cannot be compiled here: {error}") from None
    return target


def _used(clocks: list[ProcessClock]) -> float:
    return sum(clock.seconds() for clock in clocks)


def _wait(agent: Child, notes: Path, old: Collection[int] = ()) -> list[_Note]:
    """The notes of all workers, by rank, once none is missing, or of a pid in `old`. Raises BenchError: some are."""
    deadline = time.monotonic() + _TIMEOUT
    while True:
        found = [_Note(pid, at / 1e9) for pid, at in _NOTE.iter_unpack(notes.read_bytes())]
        if all(each.pid and each.pid not in old for each in found):
            return found
        if agent.process.poll() is not None or time.monotonic() > deadline:
            raise BenchError(f"{agent.name}: not all workers came to run; it said: {agent.last_words()}")
        time.sleep(_LOOK)


CASE = Case("many-workers", "one of 64 or 256 local workers killed, a small program in C", _run, rounds=5)
