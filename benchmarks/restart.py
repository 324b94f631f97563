"""From a worker's SIGKILL to the first line of the last restarted worker, on one node and over two."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

from benchmarks.case import OURS, THEIRS, Case, Settings, row
from benchmarks.children import Children
from benchmarks.jobs import first_lines, start_pair, start_single
from benchmarks.table import Budget, Row
from benchmarks.turns import in_turn


def _run_single(settings: Settings) -> list[Row]:
    turns = in_turn("restart", settings.rounds, {side: partial(_single, side) for side in (OURS, THEIRS)})
    return [row("worker SIGKILL to restarted workers' first line, one node", "s", turns, Budget(0.20))]


def _run_pair(settings: Settings) -> list[Row]:
    turns = in_turn("restart over 2 nodes", settings.rounds, {side: partial(_pair, side) for side in (OURS, THEIRS)})
    return [row("the same over two nodes", "s", turns, Budget(0.06))]


def _single(side: str) -> float:
    with Children() as children:
        start_single(children, side)
        return _kill_and_wait(children)


def _pair(side: str) -> float:
    with Children() as children:
        start_pair(children, side)
        return _kill_and_wait(children)


def _kill_and_wait(children: Children) -> float:
    """Kill rank 1 as soon as both workers are there; seconds until both have been replaced."""
    workers = first_lines(children, 2)
    killed_at = time.monotonic()
    os.kill(workers[1].pid, signal.SIGKILL)
    again = first_lines(children, 2, old={worker.pid for worker in workers})
    return max(worker.at for worker in again) - killed_at


SINGLE = Case("restart", "worker SIGKILL to restarted workers' first line, one node", _run_single, rounds=5)
PAIR = Case("restart-2-nodes", "the same over two nodes on loopback", _run_pair)
