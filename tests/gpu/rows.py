"""The table: a row has the check, the expected result, the actual result, and the time it took.

Laws:

1. A check that fails, raises or takes too long is one row; the next check runs.
2. A check that this machine cannot run is a row too, with the state "not run" and the reason.
3. The results are written after each row, so a killed run leaves the rows it has.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.case import BenchError

from tests.gpu.machine import Machine

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
VERSION = 1


class Unexpected(Exception):
    """What was seen instead of what is expected."""


class Row(NamedTuple):
    group: str
    what: str
    expected: str
    seen: str
    state: str
    seconds: float


@dataclass(frozen=True)
class Needs:
    """What a check needs: GPUs and nodes of the run, and whether processors can rehearse it."""

    gpus: int = 1
    nodes: int = 1
    rehearsal: bool = False

    def missing(self, machine: Machine, nodes: int, *, rehearsed: bool) -> str:
        """Why the check cannot run; empty if it can."""
        if (nodes > 1) != (self.nodes > 1):
            return f"needs {self.nodes} nodes" if self.nodes > 1 else "runs on one node"
        if rehearsed:
            return "" if self.rehearsal else "needs a GPU"
        if len(machine.gpus) < self.gpus:
            return f"needs {self.gpus} GPUs"
        return ""


@dataclass
class Bench:
    """What the checks of one run share."""

    machine: Machine
    device: str
    """`cuda`, or `cpu` in a rehearsal."""
    folder: Path
    """For checkpoints and logs; removed at the end."""
    nodes: Sequence[str] = ()
    """Flags of rallyrun by which the nodes of this run meet; none on one node."""
    figures: dict[str, float] = field(default_factory=dict)
    """What a later check compares with, by name."""

    @property
    def rehearsed(self) -> bool:
        return self.device == "cpu"

    @property
    def backend(self) -> str:
        return "gloo" if self.rehearsed else "nccl"

    def new_folder(self, name: str) -> Path:
        made = self.folder / name
        made.mkdir()
        return made


class Check(NamedTuple):
    """One row to be. `run` returns what it has seen, or raises Unexpected."""

    group: str
    what: str
    expected: str
    run: Callable[[Bench], str]
    needs: Needs = Needs()

    @property
    def name(self) -> str:
        return f"{self.group}: {self.what}"


def rows_of(
    checks: Iterable[Check], bench: Bench, node_count: int, deadline: float, note: Callable[[Row], None]
) -> list[Row]:
    """Run the checks one after the other; `note` is called with each row as it is known.

    Args:
        deadline: on the monotonic clock; checks that have not begun by then are failures.
    """
    rows: list[Row] = []
    for check in checks:
        row = _row(check, bench, node_count, deadline)
        rows.append(row)
        note(row)
    return rows


def _row(check: Check, bench: Bench, node_count: int, deadline: float) -> Row:
    began = time.monotonic()

    def row(state: str, seen: str) -> Row:
        took = round(time.monotonic() - began, 2)
        return Row(check.group, check.what, check.expected, " ".join(seen.split()), state, took)

    if missing := check.needs.missing(bench.machine, node_count, rehearsed=bench.rehearsed):
        return row(NOT_RUN, missing)
    if began >= deadline:
        return row(FAILED, "the time limit of the run was reached before this check")
    try:
        return row(PASSED, check.run(bench))
    except (Unexpected, BenchError) as error:
        return row(FAILED, str(error))
    except Exception as error:
        return row(FAILED, f"{type(error).__name__}: {error}")


def write_results(path: Path, machine: Machine, rows: Sequence[Row], at: str, *, rehearsed: bool) -> None:
    """Write the results as JSON, in one step."""
    found: dict[str, Any] = {
        "version": VERSION,
        "at": at,
        "rehearsed": rehearsed,
        "machine": asdict(machine),
        "rows": [row._asdict() for row in rows],
    }
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(json.dumps(found, indent=1) + "\n")
    os.replace(draft, path)


def as_text(row: Row) -> str:
    """One row for a terminal."""
    head = f"{row.state.upper():8} {row.seconds:6.1f} s  {row.group}: {row.what}"
    return head if row.state == NOT_RUN else f"{head}\n{' ' * 19}{row.seen}" + _wanted(row)


def _wanted(row: Row) -> str:
    return f"\n{' ' * 19}expected: {row.expected}" if row.state == FAILED else ""
