"""Jobs of the tiny worker under either launcher, and the lines by which its workers report."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.case import OURS, THEIRS
from benchmarks.children import ROOT, Child, Children, launcher

COMMANDS = {OURS: "rallyrun", THEIRS: "torchrun"}
_WORKER = str(ROOT / "benchmarks" / "programs" / "worker.py")
_LINE = re.compile(r"worker rank=(\d+) pid=(\d+)")
_TIMEOUT = 90.0  # seconds for workers to appear


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
    endpoint = f"127.0.0.1:{free_port()}"
    return [start_node(children, side, node, "2", endpoint) for node in range(2)]


def start_node(
    children: Children,
    side: str,
    node: int,
    nnodes: str,
    endpoint: str,
    conf: str = "",
    entry: Sequence[str] = (),
    backend: str = "c10d",
    env: Mapping[str, str] | None = None,
) -> Child:
    """One agent of several, with one worker and one restart allowed.

    Args:
        children: who starts it.
        side: whose launcher.
        node: its number, for messages.
        nnodes: `--nnodes`.
        endpoint: where the control plane is.
        conf: `--rdzv-conf`.
        entry: what the command line begins with, to run elsewhere than here.
        backend: `--rdzv-backend`.
        env: more variables for it.
    """
    options = [
        f"--nnodes={nnodes}",
        "--nproc-per-node=1",
        "--max-restarts=1",
        f"--rdzv-backend={backend}",
        f"--rdzv-endpoint={endpoint}",
        "--rdzv-id=bench",
        *([f"--rdzv-conf={conf}"] if conf else []),
    ]
    argv = [*entry, launcher(COMMANDS[side]), *options, _WORKER]
    return children.start(f"{COMMANDS[side]} (node {node})", argv, env)


def first_lines(children: Children, count: int, old: Collection[int] = (), timeout: float = _TIMEOUT) -> list[Worker]:
    """Wait until `count` workers that are not in `old` (pids) have printed their line, and return them by rank.

    A rank that prints twice counts by its last line.

    Args:
        children: who is listened to.
        count: how many ranks.
        old: pids whose lines do not count.
        timeout: seconds to wait.

    Raises:
        BenchError: they did not, or a launcher ended.
    """
    found: dict[int, Worker] = {}
    deadline = time.monotonic() + timeout
    while len(found) < count:
        line = children.next_line(deadline, f"the first line of {count} {'restarted ' if old else ''}workers")
        if (match := _LINE.fullmatch(line.text.strip())) and int(match[2]) not in old:
            found[int(match[1])] = Worker(int(match[1]), int(match[2]), line.at)
    return [found[rank] for rank in sorted(found)]


def after_a_kill(children: Children, workers: Sequence[Worker]) -> float:
    """SIGKILL to the second of two workers; seconds until both have been replaced."""
    at = time.monotonic()
    os.kill(workers[1].pid, signal.SIGKILL)
    again = first_lines(children, 2, old={worker.pid for worker in workers})
    return max(worker.at for worker in again) - at


def free_port() -> int:
    """A port that the kernel just had free; both agents must be told the same one before either listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
