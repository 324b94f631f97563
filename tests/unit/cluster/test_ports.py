"""The port of a job: outside of the kernel's range, of others' ports, and of those of jobs that run beside it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.clusters.detect import _USED_BY_OTHERS, DEFAULT_RANGE, control_port
from tests.effort import examples

RANGES = ("32768 60999", "32768\t60999\n", "15000 61000", "10000 65000", "1024 20000", "9000 65500", "20000 60999")


@settings(max_examples=examples(300))
@given(st.integers(0, 2**32), st.integers(0, 500), st.integers(0, 50), st.sampled_from(RANGES))
def test_it_is_where_nobody_else_is(job: int, step: int, restart: int, ephemeral: str) -> None:
    port, is_outside = control_port(job, step, restart, ephemeral)
    low, high = map(int, ephemeral.split())
    assert is_outside
    assert 5000 <= port <= 65535
    assert not low <= port <= high
    assert port not in _USED_BY_OTHERS


@pytest.mark.parametrize("ephemeral", ["1024 65535", "5000 65535"])
def test_a_kernel_that_takes_all_ports_is_said(ephemeral: str) -> None:
    port, is_outside = control_port(12, 0, 0, ephemeral)
    assert (10000 <= port <= 32767, is_outside) == (True, False)


@pytest.mark.parametrize("text", ["", "x", "1 2 3", "60999 32768", "1 99999", "-1 5", "\u0661 \u0662"])
def test_what_is_no_range_is_the_kernels_own(text: str) -> None:
    assert control_port(12, ephemeral=text) == control_port(12, ephemeral=DEFAULT_RANGE)


def test_jobs_and_steps_and_restarts_beside_one_another_have_ports_of_their_own() -> None:
    beside = [(1000 + job, step, restart) for job in range(50) for step in range(8) for restart in range(3)]
    assert len({control_port(*numbers)[0] for numbers in beside}) == len(beside)
