"""Signals on their way to the workers: who was sent them already, who is sent them now or later."""

from __future__ import annotations

import math
import os
import signal
import sys

import pytest

from rallypoint.workers.forwarding import BURST, SETTLE, Forwarding
from rallypoint.workers.guardian.client import Guardian
from rallypoint.workers.guardian.family import below, processes
from rallypoint.workers.process import WorkerProcess
from tests.unit.workers.test_process import ends

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


class Site:
    """A node whose guardian was sent what a test says, at a time that a test sets."""

    def __init__(self, scheduled: bool) -> None:
        self.now = 0.0
        self.kept: list[int] = []
        self.sent: list[int] = []
        self.forwarding = Forwarding(self._heard, self.sent.append, scheduled, self)

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
    assert site.forwarding.takes(TERM)
    assert site.forwarding.in_hand(TERM)
    assert site.forwarding.wake_at() == math.inf
    site.later(SETTLE)
    assert site.forwarding.takes(TERM), "schedulers say things twice"
    site.later(BURST)
    assert site.sent == []
    assert not site.forwarding.in_hand(TERM)


def test_without_a_scheduler_nobody_waits() -> None:
    site = Site(scheduled=False)
    assert not site.forwarding.takes(TERM)
    assert not site.forwarding.in_hand(TERM)
    site.kept = [USR1]
    assert not site.forwarding.takes(TERM), "another signal is no witness"


def test_a_scheduler_that_signals_the_agent_alone() -> None:
    site = Site(scheduled=True)
    assert site.forwarding.takes(USR1)
    assert site.forwarding.in_hand(USR1)
    assert site.forwarding.wake_at() == site.now + SETTLE
    site.later(SETTLE / 2)
    assert site.forwarding.takes(TERM)
    assert site.sent == []
    site.later(SETTLE / 2)
    assert site.sent == [USR1]
    site.later(SETTLE)
    assert site.sent == [USR1, TERM]
    assert site.forwarding.wake_at() == math.inf


def test_a_scheduler_that_is_still_at_it() -> None:
    site = Site(scheduled=True)
    assert site.forwarding.takes(TERM)
    site.kept = [TERM]
    site.later(SETTLE)
    assert site.sent == []
    assert site.forwarding.wake_at() == math.inf


def test_workers_that_start_are_sent_nothing_of_before() -> None:
    site = Site(scheduled=True)
    assert site.forwarding.takes(TERM)
    site.kept = [USR1]
    assert site.forwarding.reached() == {USR1}
    site.forwarding.forget()
    site.later(SETTLE)
    assert site.sent == []
    assert site.forwarding.reached() == frozenset()


def test_what_came_a_moment_before_is_known() -> None:
    site = Site(scheduled=False)
    site.kept = [TERM, USR1]
    assert site.forwarding.reached() == {TERM, USR1}
    site.now += BURST / 2
    assert site.forwarding.takes(TERM), "it was asked for before this agent's own came"
    site.now += BURST
    assert site.forwarding.reached() == frozenset()


def process_of(guardian: Guardian) -> int:
    """The guardian's own process, which its keeper has forked; it is there when it answers."""
    assert guardian.heard() == []
    (found,) = below(guardian.pid, {pid: each.parent for pid, each in processes().items()})
    return found


@pytest.mark.process
def test_the_guardian_keeps_what_it_is_sent(guardian: Guardian) -> None:
    pid = process_of(guardian)
    for number in (TERM, USR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCONT, TERM):
        os.kill(pid, number)
    assert guardian.heard() == sorted([TERM, USR1, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCONT])
    assert guardian.heard() == []


@pytest.mark.process
def test_a_worker_that_starts_has_not_been_sent_what_came_before(guardian: Guardian) -> None:
    pid = process_of(guardian)
    os.kill(pid, TERM)
    process = WorkerProcess(guardian, [sys.executable, "-c", ""], os.environ)
    assert guardian.heard() == []
    assert ends(process) == 0
    process.release()
