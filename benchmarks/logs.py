"""What `--tee 3` carries from 8 workers to the console: lines and bytes a second, and whether all of it arrived.

The console is a pair of files, and so are the workers' logs, all in memory where there is space. Time runs from the
moment when all workers may write until all bytes are there, or the launcher has ended. So it holds, for both launchers
alike, that the workers write a text that they made before, 64 KiB at a time, into files (nothing holds them up), and
that nobody reads the console; a terminal, or a program behind a pipe, has a pace of its own, which is not shown here.
Workers and launcher share the processors: with few of them, the writing itself is a good part of the time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.case import OURS, THEIRS, BenchError, Budget, Case, Row, Settings, Turns, in_turn, row
from benchmarks.children import Child, Children, launcher
from benchmarks.jobs import COMMANDS
from benchmarks.programs.writer import STREAMS, text

_WORKERS = 8
_TIMEOUT = 240.0  # seconds for one launcher to carry everything
_PREFIX = re.compile(rb"\[default([0-7])\]:")
_MEMORY, _ROOM = "/dev/shm", 2 * 10**9
_LOOK = 0.001  # seconds between looks at the console's files


@dataclass(frozen=True, slots=True)
class _Load:
    """What each worker writes to each of its streams."""

    lines: int
    length: int

    @property
    def total(self) -> int:
        return self.lines * _WORKERS * len(STREAMS)

    @property
    def console(self) -> int:
        """Bytes that the console shall show: each line gets a prefix."""
        return self.total * (self.length + len("[default0]:"))


@dataclass(frozen=True, slots=True)
class _Carried:
    seconds: float
    broken: int
    """Streams of workers that did not arrive whole and in order."""


_SHORT, _LONG = _Load(50_000, 100), _Load(1_500, 16 * 1024)
_QUICK = {_SHORT: _Load(2_000, 100), _LONG: _Load(60, 16 * 1024)}


def _run(settings: Settings) -> list[Row]:
    rows = []
    for what, full, amount, unit, least in (
        ("lines of 100 bytes", _SHORT, 1.0, "lines/s", 5.0),
        ("bytes, in lines of 16 KiB", _LONG, 16 * 1024 / 1e6, "MB/s", 3.0),
    ):
        load = _QUICK[full] if settings.quick else full
        sides = {side: partial(_carry, side, load) for side in (OURS, THEIRS)}
        turns = in_turn(what, settings.rounds, sides)
        remarks = tuple(_integrity(side, results) for side, results in turns.results.items() if results)
        speeds = {side: [load.total * amount / each.seconds for each in all_] for side, all_ in turns.results.items()}
        title = f"--tee 3 from {_WORKERS} workers: {what}"
        rows.append(row(title, unit, Turns(speeds, turns.failures), Budget(least, at_least=True), remarks))
    return rows


def _integrity(side: str, results: list[_Carried]) -> str:
    broken = max(each.broken for each in results)
    if not broken:
        return f"{COMMANDS[side]}: every byte of all streams arrived in order (SHA-256)"
    return f"{COMMANDS[side]}: up to {broken} of {_WORKERS * len(STREAMS)} streams did not arrive whole and in order"


def _carry(side: str, load: _Load) -> _Carried:
    with tempfile.TemporaryDirectory(prefix="rallybench-logs-", dir=_place()) as name, Children() as children:
        folder = Path(name)
        with _gate(folder):
            agent = _start(children, side, folder, load)
            _wait(agent, lambda: len(list(folder.glob("ready.*"))) == _WORKERS, "workers that are ready")
        begin = time.monotonic()
        seconds = _wait(agent, lambda: _shown(folder) >= load.console, "all output", beyond_its_end=True) - begin
        _wait(agent, lambda: agent.process.poll() is not None, "its end")
        broken = sum(_broken(folder / console, stream, load) for console, stream in _CONSOLE)
        if side == OURS and broken:
            raise BenchError(f"{broken} streams of workers did not arrive whole and in order")
        return _Carried(seconds, broken)


def _place() -> str | None:
    """Where there is space in memory, that: a disk's pace would be the same for both."""
    try:
        free = shutil.disk_usage(_MEMORY).free
    except OSError:
        return None
    return _MEMORY if free > _ROOM and os.access(_MEMORY, os.W_OK) else None


_CONSOLE = (("out", 1), ("err", 2))


@contextmanager
def _gate(folder: Path) -> Iterator[None]:
    """A file that is locked inside the block."""
    with open(folder / "gate", "w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        yield


def _start(children: Children, side: str, folder: Path, load: _Load) -> Child:
    options = ["--standalone", f"--nproc-per-node={_WORKERS}", "--tee=3", f"--log-dir={folder / 'logs'}"]
    worker = ["-m", "benchmarks.programs.writer", str(folder), str(load.lines), str(load.length)]
    to_files = ["/bin/sh", "-c", 'exec "$@" >"$0/out" 2>"$0/err"', str(folder)]
    return children.start(COMMANDS[side], [*to_files, launcher(COMMANDS[side]), *options, *worker])


def _shown(folder: Path) -> int:
    return sum((folder / console).stat().st_size for console, _ in _CONSOLE)


def _wait(agent: Child, holds: Callable[[], bool], awaited: str, *, beyond_its_end: bool = False) -> float:
    """Wait until something holds, and return the moment (monotonic seconds).

    Args:
        agent: the launcher.
        holds: what is waited for.
        awaited: what that is, for the message.
        beyond_its_end: whether the launcher's end is as good.

    Raises:
        BenchError: it does not hold in time, or the launcher ended before.
    """
    deadline = time.monotonic() + _TIMEOUT
    while not holds():
        ended = agent.process.poll() is not None
        if ended and beyond_its_end:
            break
        if ended or time.monotonic() > deadline:
            raise BenchError(f"{agent.name} {'ended' if ended else f'ran {_TIMEOUT:.0f} s'} before {awaited}")
        time.sleep(_LOOK)
    return time.monotonic()


def _broken(console: Path, stream: int, load: _Load) -> int:
    """How many workers' text of this stream is not on the console as it was written."""
    arrived = {rank: hashlib.sha256() for rank in range(_WORKERS)}
    with open(console, "rb") as lines:
        for line in lines:
            if match := _PREFIX.match(line):
                arrived[int(match[1])].update(line[match.end() :])
    written = {rank: hashlib.sha256(text(rank, stream, load.lines, load.length)) for rank in range(_WORKERS)}
    return sum(arrived[rank].digest() != written[rank].digest() for rank in range(_WORKERS))


CASE = Case("logs", "output carried by --tee 3 from 8 workers", _run)
