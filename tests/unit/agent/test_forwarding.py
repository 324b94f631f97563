"""Forwarding signals to the workers: to which of them, now or later."""

from __future__ import annotations

import math
import signal

import pytest

from rallypoint.agent.signals import BURST, SETTLE_TIME, SignalForwarding

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


class Site:
    """A node with a clock that a test moves; `kept` has the signals that the reaper received."""

    def __init__(self, scheduled: bool) -> None:
        self.now = 0.0
        self.kept: list[int] = []
        self.sent: list[int] = []
        self.forwarding = SignalForwarding(self._take_kept, self.sent.append, scheduled, self)

    def monotonic(self) -> float:
        return self.now

    def _take_kept(self) -> list[int]:
        kept, self.kept = self.kept, []
        return kept

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.forwarding.step()


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_signal_that_all_received_is_not_forwarded(scheduled: bool) -> None:
    site = Site(scheduled)
    site.kept = [TERM]
    assert site.forwarding.forward(TERM)
    assert site.forwarding.is_handled(TERM)
    assert site.forwarding.wake_at() == math.inf
    site.later(SETTLE_TIME)
    assert site.forwarding.forward(TERM), "schedulers repeat signals"
    site.later(BURST)
    assert site.sent == []
    assert not site.forwarding.is_handled(TERM)


def test_without_a_scheduler_signals_are_not_delayed() -> None:
    site = Site(scheduled=False)
    assert not site.forwarding.forward(TERM)
    assert not site.forwarding.is_handled(TERM)
    site.kept = [USR1]
    assert not site.forwarding.forward(TERM), "another signal proves nothing"


def test_a_scheduler_that_signals_only_the_agent() -> None:
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


def test_a_repeated_signal_is_not_delayed_further() -> None:
    site = Site(scheduled=True)
    for _ in range(2):
        assert site.forwarding.forward(TERM)
        site.later(SETTLE_TIME / 2)
    assert site.sent == [TERM]
    assert site.forwarding.forward(TERM)
    site.kept = [TERM]  # the scheduler signals the workers a moment after the agent
    site.later(SETTLE_TIME)
    assert site.sent == [TERM]
    assert site.forwarding.wake_at() == math.inf


def test_signals_to_all_count_for_a_moment_and_not_for_new_workers() -> None:
    site = Site(scheduled=False)
    site.kept = [TERM, USR1]
    assert site.forwarding.shared_signals() == {TERM, USR1}
    site.now += BURST / 2
    assert site.forwarding.forward(TERM), "the reaper received it before the agent did"
    site.now += BURST
    assert site.forwarding.shared_signals() == frozenset()
    site = Site(scheduled=True)
    assert site.forwarding.forward(TERM)
    site.kept = [USR1]
    assert site.forwarding.shared_signals() == {USR1}
    site.forwarding.reset()
    site.later(SETTLE_TIME)
    assert site.sent == []
    assert site.forwarding.shared_signals() == frozenset()
