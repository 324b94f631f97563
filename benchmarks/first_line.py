"""From the command to the first line of the last of two workers."""

from __future__ import annotations

from functools import partial

from benchmarks.case import OURS, THEIRS, Case, Settings, row
from benchmarks.children import Children
from benchmarks.jobs import first_lines, start_single
from benchmarks.table import Budget, Row
from benchmarks.turns import in_turn


def _run(settings: Settings) -> list[Row]:
    sides = {side: partial(_start, side) for side in (OURS, THEIRS)}
    turns = in_turn("start", settings.rounds, sides, warm_up=True)
    return [row("command to first line of the last of 2 workers", "s", turns, Budget(0.07))]


def _start(side: str) -> float:
    with Children() as children:
        agent = start_single(children, side)
        return max(worker.at for worker in first_lines(children, 2)) - agent.started


CASE = Case("start", "command to the first line of the last of 2 workers", _run, rounds=5)
