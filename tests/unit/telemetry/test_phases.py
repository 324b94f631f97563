"""Seconds by phase add up to the time that has passed, whatever the phases were."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.telemetry.agent_events import NodePhase, PhaseClock

STEPS = st.lists(st.tuples(st.sampled_from(NodePhase), st.floats(0, 1e6), st.floats(0, 1e4)), max_size=30)


@given(STEPS, st.floats(0, 1e6), st.floats(0, 1e6))
def test_the_seconds_by_phase_add_up(steps: list[tuple[NodePhase, float, float]], began: float, last: float) -> None:
    clock, now = PhaseClock(began), began
    for phase, lasted, held in steps:
        now += lasted
        clock.enter(phase, now, held)
    now += last
    seconds = clock.seconds(now)
    assert sum(seconds.values()) == pytest.approx(now - began, rel=1e-9, abs=1e-6)
    assert min(seconds.values()) >= 0
    assert clock.seconds(now) == seconds, "to ask changes nothing"


def test_what_is_held_back_longer_than_its_time_is_rendezvous() -> None:
    clock = PhaseClock(10.0)
    clock.enter(NodePhase.HELD_BACK, 12.0, 4.0)
    assert clock.seconds(15.0)[NodePhase.HELD_BACK] == 3.0
    clock.enter(NodePhase.STARTING, 21.0)
    found = clock.seconds(22.0)
    assert (found[NodePhase.HELD_BACK], found[NodePhase.RENDEZVOUS], found[NodePhase.STARTING]) == (4.0, 7.0, 1.0)
