"""Jobs of the tiny worker under either launcher, and the lines by which its workers report."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass

from benchmarks.case import OURS, THEIRS
from benchmarks.children import ROOT, Child, Children, launcher

COMMANDS = {OURS: "rallyrun", THEIRS: "torchrun"}
_WORKER = str(ROOT / "benchmarks" / "programs" / "worker.py")
_LINE = re.compile(r"worker rank=(\d+) pid=(\d+)")
_PATIENCE = 90.0  # seconds for workers to appear


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker's first line: its global rank and pid, and when the line arrived (monotonic seconds)."""

    rank: int
    pid: int
    at: float


def start_single(children: Children, side: str) -> Child:
    """One agent with two workers, standalone, one restart allowed."""
    argv = [launcher(COMMANDS[side]), "--standalone", "--nproc-per-node=2", "--max-restarts=1", _WORKER]
    return children.start(COMMANDS[side], argv)


def start_pair(children: Children, side: str) -> list[Child]:
    """Two agents with one worker each, meeting over c10d on a loopback port, one restart allowed."""
    options = [
        "--nnodes=2",
        "--nproc-per-node=1",
        "--max-restarts=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{_free_port()}",
        "--rdzv-id=bench",
    ]
    argv = [launcher(COMMANDS[side]), *options, _WORKER]
    return [children.start(f"{COMMANDS[side]} (node {node})", argv) for node in range(2)]


def first_lines(children: Children, count: int, old: Collection[int] = ()) -> list[Worker]:
    """Wait until `count` workers that are not in `old` (pids) have printed their line, and return them by rank.

    Raises:
        BenchError: they did not, or a launcher ended.
    """
    found: dict[int, Worker] = {}
    deadline = time.monotonic() + _PATIENCE
    while len(found) < count:
        line = children.next_line(deadline, f"the first line of {count} {'restarted ' if old else ''}workers")
        if (match := _LINE.fullmatch(line.text.strip())) and int(match[2]) not in old:
            found[int(match[1])] = Worker(int(match[1]), int(match[2]), line.at)
    return [found[rank] for rank in sorted(found)]


def _free_port() -> int:
    """A port that the kernel just had free; both agents must be told the same one before either listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
