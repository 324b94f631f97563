"""Measuring two sides in turn, so that whatever else the machine does falls on both alike."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from benchmarks.errors import BenchError

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
