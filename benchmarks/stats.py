"""Samples and what the tables say of them: medians, percentiles, spread, ratios."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


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


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two in the middle.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("a median of no values was asked for; measure at least once")
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


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
