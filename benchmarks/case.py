"""What a benchmark is: a name, a subject, and a function from settings to rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.stats import Sample
from benchmarks.table import Budget, Row
from benchmarks.turns import Turns

OURS = "rallypoint"
THEIRS = "torch"


@dataclass(frozen=True, slots=True)
class Settings:
    """How much to measure."""

    rounds: int
    quick: bool
    """Short loads and small sizes: shows that everything runs; its figures are not for comparison."""


@dataclass(frozen=True, slots=True)
class Case:
    """A benchmark that can be chosen by name."""

    name: str
    subject: str
    run: Callable[[Settings], list[Row]]
    rounds: int = 3
    """Results for each side, unless the command line says otherwise: more where one takes no time."""


def row(what: str, unit: str, turns: Turns[float], budget: Budget | None = None, remarks: tuple[str, ...] = ()) -> Row:
    """The row of a benchmark whose every turn gives one figure."""
    return Row(
        what,
        unit,
        ours=sample(turns.results.get(OURS, [])),
        base=sample(turns.results.get(THEIRS, [])),
        budget=budget,
        remarks=(*turns.remarks(), *remarks),
    )


def sample(values: list[float]) -> Sample | None:
    """The values as a sample, or None if there are none."""
    return Sample(tuple(values)) if values else None
