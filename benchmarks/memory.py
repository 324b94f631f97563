"""Memory of the agent and its helpers while two idle workers run, shared pages counted by share (PSS).

Whatever else the launcher keeps running beside its workers (a guard, a zygote) counts as the agent's.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

from benchmarks.case import OURS, THEIRS, BenchError, Budget, Case, Row, Settings, Turns, in_turn, row
from benchmarks.children import Children, descendants
from benchmarks.jobs import first_lines, start_single

_SETTLE = 1.0  # seconds after the last worker's line: what an agent still does then is its idle life
_FIELD = re.compile(r"^(VmRSS|Pss):\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one agent, in MB: its resident pages, and how many helpers are in it."""

    resident: float
    proportional: float
    """Shared pages counted by their share (PSS), MB; both sums are over the agent and its helpers."""
    helpers: int


def _run(settings: Settings) -> list[Row]:
    sides = {side: partial(_measure, side) for side in (OURS, THEIRS)}
    turns = in_turn("memory", settings.rounds, sides)
    helpers = {side: max((found.helpers for found in results), default=0) for side, results in turns.results.items()}
    remarks = tuple(
        f"{side} ran {count} processes beside agent and workers" for side, count in helpers.items() if count
    )
    resident = Turns({side: [found.resident for found in all_] for side, all_ in turns.results.items()}, turns.failures)
    shared = Turns(
        {side: [found.proportional for found in all_] for side, all_ in turns.results.items()}, turns.failures
    )
    return [
        row("memory of agent and helpers, 2 idle workers (PSS)", "MB", shared, Budget(0.09), remarks),
        row("the same, all resident pages (RSS)", "MB", resident, remarks=remarks),
    ]


def _measure(side: str) -> Memory:
    with Children() as children:
        agent = start_single(children, side)
        workers = {worker.pid for worker in first_lines(children, 2)}
        time.sleep(_SETTLE)
        return of_agent(agent.pid, workers)


def of_agent(agent: int, workers: Collection[int]) -> Memory:
    """The memory of an agent and of all below it but its workers, by pid."""
    helpers = [pid for pid in descendants(agent) if pid not in workers]
    counted = [agent, *helpers]
    return Memory(
        resident=sum(_field(pid, "status", "VmRSS") for pid in counted),
        proportional=sum(_field(pid, "smaps_rollup", "Pss") for pid in counted),
        helpers=len(helpers),
    )


def _field(pid: int, file: str, name: str) -> float:
    """A size of one process in MB (10^6 bytes), from /proc."""
    try:
        with open(f"/proc/{pid}/{file}", encoding="ascii") as source:
            sizes = dict(_FIELD.findall(source.read()))
    except (FileNotFoundError, ProcessLookupError):
        raise BenchError(f"process {pid} ended while its memory was read") from None
    return int(sizes[name]) * 1024 / 1e6


CASE = Case("memory", "memory of the agent and its helpers", _run, rounds=5)
