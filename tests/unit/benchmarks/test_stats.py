"""Samples: medians and percentiles against the dumbest way to say what they are."""

from __future__ import annotations

import math
import statistics

import pytest
from benchmarks.stats import Sample, median, percentile, ratio
from hypothesis import given
from hypothesis import strategies as st

_VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1)


@given(_VALUES)
def test_the_median_is_the_standard_librarys(values: list[float]) -> None:
    assert median(values) == pytest.approx(statistics.median(values))


@given(_VALUES, st.floats(0, 1))
def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed(values: list[float], share: float) -> None:
    enough = [value for value in values if sum(other <= value for other in values) >= share * len(values)]
    assert percentile(values, share) == min(enough)


def test_the_spread_is_the_lowest_and_the_highest() -> None:
    assert Sample((2.0, 9.0, 3.0)).spread == (2.0, 9.0)
    assert Sample((2.0, 9.0, 3.0)).times(4).values == (8.0, 36.0, 12.0)


def test_a_ratio_is_of_medians() -> None:
    assert ratio(Sample((1.0, 2.0, 100.0)), Sample((4.0,))) == 0.5
    assert ratio(Sample((1.0,)), Sample((0.0,))) == math.inf


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], 1.5), ([1.0], -0.1)])
def test_what_has_no_percentile_is_refused(values: list[float], share: float) -> None:
    with pytest.raises(ValueError, match="a percentile of"):
        percentile(values, share)


def test_nothing_has_no_median() -> None:
    with pytest.raises(ValueError, match="measure at least once"):
        median([])
