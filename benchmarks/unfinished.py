"""A run of everything that takes several sittings: what has been measured is kept after each benchmark.

Law: all rows that are kept are of one machine with one set of software; of another one there are none.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from benchmarks.machine import Machine
from benchmarks.results import FOLDER
from benchmarks.table import Row

_FILE = FOLDER / "unfinished.json"


class Unfinished(msgspec.Struct):
    """The rows of the benchmarks that are done, by name."""

    machine: Machine
    rows: dict[str, list[Row]]


def begin(machine: Machine, go_on: bool, path: Path = _FILE) -> Unfinished:
    """What an earlier sitting has left, if it is to be gone on with and was on this machine; else nothing."""
    if go_on and path.exists():
        found = msgspec.json.decode(path.read_bytes(), type=Unfinished)
        if _same(found.machine, machine):
            return found
    return Unfinished(machine, {})


def keep(run: Unfinished, name: str, rows: list[Row], path: Path = _FILE) -> None:
    """One more benchmark is done."""
    run.rows[name] = rows
    path.parent.mkdir(exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_bytes(msgspec.json.encode(run))
    draft.replace(path)


def finish(path: Path = _FILE) -> None:
    """All are done: the next run begins with nothing."""
    path.unlink(missing_ok=True)


def _same(one: Machine, other: Machine) -> bool:
    """Whether only the load differs."""
    return replace(one, load_average=other.load_average) == other
