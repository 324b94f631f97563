"""Signals on their way to the workers: which workers have them already, and which get them now or later."""

from __future__ import annotations

import math
import signal

import pytest

from rallypoint.agent.signals import BURST, SETTLE_TIME, SignalForwarding

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


class Site:
    """A node whose reaper was sent what a test says, at a time that a test sets."""

    def __init__(self, scheduled: bool) -> None:
        self.now = 0.0
        self.kept: list[int] = []
        self.sent: list[int] = []
        self.forwarding = SignalForwarding(self._heard, self.sent.append, scheduled, self)

    def monotonic(self) -> float:
        return self.now

    def _heard(self) -> list[int]:
        kept, self.kept = self.kept, []
        return kept

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.forwarding.step()


@pytest.mark.parametrize("scheduled", [False, True])
def test_what_all_were_sent_is_sent_to_nobody_again(scheduled: bool) -> None:
    site = Site(scheduled)
    site.kept = [TERM]
    assert site.forwarding.forward(TERM)
    assert site.forwarding.is_handled(TERM)
    assert site.forwarding.wake_at() == math.inf
    site.later(SETTLE_TIME)
    assert site.forwarding.forward(TERM), "schedulers say things twice"
    site.later(BURST)
    assert site.sent == []
    assert not site.forwarding.is_handled(TERM)


def test_without_a_scheduler_nobody_waits() -> None:
    site = Site(scheduled=False)
    assert not site.forwarding.forward(TERM)
    assert not site.forwarding.is_handled(TERM)
    site.kept = [USR1]
    assert not site.forwarding.forward(TERM), "another signal proves nothing"


def test_a_scheduler_that_signals_the_agent_alone() -> None:
    site = Site(scheduled=True)
    assert site.forwarding.forward(USR1)
    assert site.forwarding.is_handled(USR1)
    assert site.forwarding.wake_at() == site.now + SETTLE_TIME
    site.later(SETTLE_TIME / 2)
    assert site.forwarding.forward(TERM)
    assert site.sent == []
    site.later(SETTLE_TIME / 2)
    assert site.sent == [USR1]
    site.later(SETTLE_TIME)
    assert site.sent == [USR1, TERM]
    assert site.forwarding.wake_at() == math.inf


def test_a_signal_that_is_repeated_is_put_off_no_longer() -> None:
    site = Site(scheduled=True)
    for _ in range(2):
        assert site.forwarding.forward(TERM)
        site.later(SETTLE_TIME / 2)
    assert site.sent == [TERM]


def test_a_scheduler_that_is_still_at_it() -> None:
    site = Site(scheduled=True)
    assert site.forwarding.forward(TERM)
    site.kept = [TERM]
    site.later(SETTLE_TIME)
    assert site.sent == []
    assert site.forwarding.wake_at() == math.inf


def test_workers_that_start_are_sent_nothing_of_before() -> None:
    site = Site(scheduled=True)
    assert site.forwarding.forward(TERM)
    site.kept = [USR1]
    assert site.forwarding.shared_signals() == {USR1}
    site.forwarding.reset()
    site.later(SETTLE_TIME)
    assert site.sent == []
    assert site.forwarding.shared_signals() == frozenset()


def test_what_came_a_moment_before_is_known() -> None:
    site = Site(scheduled=False)
    site.kept = [TERM, USR1]
    assert site.forwarding.shared_signals() == {TERM, USR1}
    site.now += BURST / 2
    assert site.forwarding.forward(TERM), "it was asked for before this agent's own came"
    site.now += BURST
    assert site.forwarding.shared_signals() == frozenset()
