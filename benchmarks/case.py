"""What a benchmark is: sides that are measured in turn, and rows of figures with budgets, as a table."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Generic, TypeVar


class BenchError(Exception):
    """One side of a benchmark gave no figure; the message says which process, what was waited for and what it said."""


# Samples


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of the values do not exceed (nearest rank).

    Raises:
        ValueError: there are no values, or `share` is not between 0 and 1.
    """
    if not values:
        raise ValueError("a percentile of no values was asked for; measure at least once")
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"a percentile of {share} was asked for; a share lies between 0 and 1")
    rank = max(1, math.ceil(share * len(values)))
    return sorted(values)[rank - 1]


@dataclass(frozen=True, slots=True)
class Sample:
    """What one side of a benchmark measured: one value a round, in the unit of its row."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The figure that the tables show and ratios are made of."""
        return median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """The lowest and the highest value."""
        return min(self.values), max(self.values)

    def times(self, factor: float) -> Sample:
        """Every value multiplied by `factor`."""
        return Sample(tuple(value * factor for value in self.values))


def ratio(ours: Sample, base: Sample) -> float:
    """Our median over the other's; infinity where the other's is zero."""
    return ours.median / base.median if base.median else math.inf


# Turns: two sides are measured in turn, so that whatever else the machine does falls on both alike

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Turns(Generic[T]):
    """What each side measured, one result a round; a side that failed has a reason instead of results."""

    results: Mapping[str, list[T]]
    failures: Mapping[str, str]

    def remarks(self) -> tuple[str, ...]:
        """Why sides are missing, or have fewer results than others; one sentence each."""
        missing = [f"{side} not measured: {reason}" for side, reason in self.failures.items()]
        counts = {side: len(results) for side, results in self.results.items() if results}
        most = max(counts.values(), default=0)
        return (*missing, *(f"{side} measured in {n} of {most} rounds" for side, n in counts.items() if n < most))


def in_turn(
    what: str, rounds: int, sides: Mapping[str, Callable[[], T]], warm_up: bool = False, enough: float = math.inf
) -> Turns[T]:
    """Call every side once a round, in the order given, and keep what they return.

    Args:
        what: the benchmark's name, for the progress on standard error.
        rounds: how many results each side is to give.
        sides: name of the side -> the measurement. One that raises BenchError is left out from then on.
        warm_up: do one round more before, and throw its results away (files into the page cache).
        enough: a side that has taken so many seconds in all is left with the results that it has.
    """
    taken = dict.fromkeys(sides, 0.0)
    results: dict[str, list[T]] = {side: [] for side in sides}
    failures: dict[str, str] = {}
    for number in range(0 if warm_up else 1, rounds + 1):
        for side, measure in sides.items():
            if side in failures or taken[side] >= enough:
                continue
            print(f"  {what}: {side}, {f'round {number} of {rounds}' if number else 'warming up'}", file=sys.stderr)
            begun = time.monotonic()
            try:
                result = measure()
            except BenchError as error:
                failures[side] = str(error)
                results[side].clear()
                continue
            taken[side] += time.monotonic() - begun
            if number:
                results[side].append(result)
    return Turns(results, failures)


# Rows

HEADINGS = ("what", "ours", "torchrun", "ratio", "budget", "verdict")


@dataclass(frozen=True, slots=True)
class Budget:
    """How the ratio of ours to the other's, or our own figure, must turn out (design section 8)."""

    limit: float
    at_least: bool = False
    """True where more is better (requests per second)."""
    unit: str = ""
    """Where given, the limit is one of our own figure in this unit, and not of the ratio."""

    def met(self, measured: float) -> bool:
        """Whether a ratio, or our figure, is within the budget."""
        return measured >= self.limit if self.at_least else measured <= self.limit

    def verdict(self, measured: float) -> str:
        """`met`, or by how much it was missed: the difference, and as a multiple of the budget."""
        if self.met(measured):
            return "met"
        return f"missed by {number(abs(measured - self.limit))} ({measured / self.limit:.2f} x budget)"

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g} {self.unit}".rstrip()


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, ours beside theirs.

    A side that was not measured is None, and `remarks` says why. `base_name` is given where the other side is not
    torchrun or torch's store (linearity is a ratio of ours to ours).
    """

    what: str
    unit: str
    ours: Sample | None
    base: Sample | None
    budget: Budget | None = None
    base_name: str = ""
    never: str = ""
    """What to say in place of the other side's figure, where it has none because what is timed does not happen."""
    remarks: tuple[str, ...] = ()

    @property
    def ratio(self) -> float | None:
        """Ours over theirs, of medians; None where a side is missing."""
        return ratio(self.ours, self.base) if self.ours and self.base else None

    @property
    def verdict(self) -> str:
        """`met`, `missed by ...`, `not measured`, or nothing where there is no budget."""
        if self.budget is None:
            return "" if self.ours else "not measured"
        own = self.ours.median if self.ours else None
        measured = own if self.budget.unit else self.ratio
        return "not measured" if measured is None else self.budget.verdict(measured)


def render(rows: Sequence[Row]) -> str:
    """The table as text, one line a row, columns aligned; remarks follow below it."""
    cells = [HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS))]
    lines = [_line(line, widths) for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, *_remarks(rows)])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    aligned = [
        f"{cell:>{width}}" if 0 < i < 4 else f"{cell:<{width}}"
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(aligned).rstrip()


def _cells(row: Row) -> tuple[str, ...]:
    base = row.never or _side(row.base, row.unit)
    return (
        row.what,
        _side(row.ours, row.unit),
        f"{base} [{row.base_name}]" if row.base_name else base,
        "" if row.ratio is None else number(row.ratio),
        "" if row.budget is None else str(row.budget),
        row.verdict,
    )


def _side(sample: Sample | None, unit: str) -> str:
    if sample is None:
        return "-"
    low, high = sample.spread
    spread = f" ({number(low)}..{number(high)})" if len(sample.values) > 1 else ""
    return f"{number(sample.median)} {unit}{spread}"


def _remarks(rows: Iterable[Row]) -> list[str]:
    """Every remark once, with the rows that it belongs to."""
    subjects: dict[str, list[str]] = {}
    for row in rows:
        for remark in row.remarks:
            subjects.setdefault(remark, []).append(row.what)
    lines = []
    for remark, what in subjects.items():
        others = f" (and {len(what) - 1} more)" if len(what) > 1 else ""
        lines.append(f"{what[0]}{others}: {remark}")
    return ["", *lines] if lines else []


def number(value: float) -> str:
    """Three significant digits, thousands grouped, never an exponent."""
    value = float(f"{value:.3g}") if abs(value) < 100 else value
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    for edge, digits in ((10, 1), (1, 2), (0.1, 3), (0.01, 4)):
        if size >= edge:
            return f"{value:.{digits}f}"
    return f"{value:.5f}" if size else "0"


# Cases

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
