"""The progress probe: an agent that sleeps is well, one that stands still is not."""

from __future__ import annotations

import math
import time

from rallypoint.observe.health import ProgressProbe
from tests.unit.clocks import HandClock


def test_an_agent_that_sleeps_for_ever_is_well() -> None:
    clock = HandClock(100.0)
    probe = ProgressProbe(clock)
    probe.going_to_sleep(math.inf, {"state": "HEALTHY"})
    clock.now += 1e6
    assert probe.age() == 0.0
    assert probe.status() == {"state": "HEALTHY"}
    assert abs(probe.last_progress() - time.time()) < 60


def test_an_agent_that_is_at_something_stands_still_since_it_woke() -> None:
    clock = HandClock(100.0)
    probe = ProgressProbe(clock)
    probe.going_to_sleep(math.inf, {"state": "HEALTHY"})
    clock.now += 50
    probe.on_wake()
    clock.now += 7
    assert probe.age() == 7.0
    assert probe.status() == {"state": "HEALTHY"}
    probe.going_to_sleep(math.inf, {"state": "STOPPED"})
    assert probe.age() == 0.0


def test_an_agent_that_oversleeps_stands_still_since_it_should_have_woken() -> None:
    clock = HandClock(100.0)
    probe = ProgressProbe(clock)
    probe.going_to_sleep(clock.now + 10, {})
    clock.now += 9
    assert probe.age() == 0.0
    clock.now += 4
    assert probe.age() == 3.0


def test_before_the_first_sleep_it_counts_as_awake() -> None:
    clock = HandClock(100.0)
    probe = ProgressProbe(clock)
    clock.now += 2
    assert probe.age() == 2.0
    assert probe.status() == {}
