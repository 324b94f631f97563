"""Rows of results, their budgets, and the table that a person reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.stats import Sample, ratio

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
