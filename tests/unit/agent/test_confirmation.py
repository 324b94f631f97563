"""An agent asks whether its place still stands if its last answer may be older than the lease."""

from __future__ import annotations

import math

from rallypoint.agent.confirmation import Confirmation
from rallypoint.control.protocol.messages import Confirmed, ConfirmRequest, Request

LEASE = 3.0


class Place:
    """A node with a clock that stands still; what it sends is kept."""

    def __init__(self, lease: float = LEASE) -> None:
        self.now = 100.0
        self.lease = lease
        self.confirmed_at = -math.inf
        self.sent: list[Request] = []
        self.confirmation = Confirmation(self, self)
        self.confirmation.requests_place()

    def monotonic(self) -> float:
        return self.now

    def send(self, request: Request) -> None:
        self.sent.append(request)

    def holds_after(self, seconds: float) -> bool:
        self.now += seconds
        return self.confirmation.must_wait()


def test_a_place_given_within_the_lease_needs_no_message() -> None:
    place = Place()
    assert not place.holds_after(LEASE)
    assert not place.sent


def test_an_older_one_waits_for_the_answer() -> None:
    place = Place()
    assert place.holds_after(LEASE + 0.1)
    assert place.holds_after(0.0)
    assert place.sent == [ConfirmRequest(1)]
    place.confirmation.on_event(Confirmed(1))
    assert not place.holds_after(0.0)


def test_an_answer_is_as_old_as_its_request() -> None:
    """It was in the buffer of a frozen process."""
    place = Place()
    assert place.holds_after(LEASE + 0.1)
    place.now += LEASE + 0.1
    place.confirmation.on_event(Confirmed(1))
    assert place.holds_after(0.0)
    place.confirmation.on_event(Confirmed(1))
    assert place.holds_after(0.0)
    place.confirmation.on_event(Confirmed(2))
    assert not place.holds_after(0.0)
    assert place.sent == [ConfirmRequest(1), ConfirmRequest(2)]


def test_the_answer_to_a_heartbeat_is_as_good_and_as_old_as_that() -> None:
    place = Place()
    place.confirmed_at = place.now + 10.0
    assert not place.holds_after(10.0 + LEASE)
    assert place.holds_after(0.1)
    assert place.sent == [ConfirmRequest(1)]


def test_the_end_of_the_round_ends_the_wait() -> None:
    place = Place()
    assert place.holds_after(10.0)
    place.confirmation.awaited = False
    place.confirmation.requests_place()
    assert not place.holds_after(0.0)
    assert place.sent == [ConfirmRequest(1)]


def test_nobody_is_asked_where_nobody_is_counted_as_lost() -> None:
    place = Place(math.inf)
    assert not place.holds_after(1e6)


class Fenced(Place):
    """The same, whose workers are killed at `fences[-1]`."""

    def __init__(self) -> None:
        super().__init__()
        self.fences: list[float] = []
        self.confirmation = Confirmation(self, self, self.fences.append)
        self.confirmation.requests_place()

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.confirmation.step()


def test_fenced_workers_run_a_lease_from_the_request_of_their_place() -> None:
    place = Fenced()
    place.now += 1.0
    place.confirmation.workers_start()
    assert place.fences == [100.0 + LEASE]
    assert place.confirmation.wake_in() == LEASE / 4
    place.after(LEASE / 4)
    assert place.sent == [ConfirmRequest(1)]
    assert not place.confirmation.has_fenced()
    place.now = 100.0 + LEASE
    assert place.confirmation.has_fenced()


def test_each_answer_moves_the_fence_to_a_lease_after_its_request() -> None:
    place = Fenced()
    place.confirmation.workers_start()
    place.after(1.0)
    place.after(1.0)
    place.confirmation.on_event(Confirmed(2))
    place.confirmation.on_event(Confirmed(1))
    assert place.fences == [100.0 + LEASE, 102.0 + LEASE]


def test_an_answer_that_is_read_late_does_not_help() -> None:
    place = Fenced()
    place.confirmation.workers_start()
    place.after(1.0)
    place.now += 10.0
    place.confirmation.on_event(Confirmed(1))
    assert place.confirmation.has_fenced()


def test_without_workers_there_is_no_fence() -> None:
    place = Fenced()
    place.confirmation.workers_start()
    place.confirmation.workers_ended()
    place.confirmation.workers_ended()
    assert place.fences == [100.0 + LEASE, math.inf]
    place.after(10.0)
    assert not place.sent
    assert not place.confirmation.has_fenced()


def test_fenced_workers_start_only_where_half_a_lease_is_left() -> None:
    place = Fenced()
    assert not place.holds_after(LEASE / 2)
    assert place.holds_after(0.1)


def test_the_word_of_an_elected_coordinator_holds_no_longer_than_its_own_lease() -> None:
    """It may be cut off, and another one elected."""
    place = Fenced()
    place.confirmation.workers_start()
    place.after(1.0)
    place.after(1.0)
    place.confirmation.on_event(Confirmed(1, 2.5))
    assert place.fences == [100.0 + LEASE, 101.0 + 2.5]
    place.now = 103.5
    assert place.confirmation.has_fenced()


def test_fenced_workers_do_not_start_on_the_answer_to_a_heartbeat() -> None:
    """It does not say for how long it holds."""
    place = Fenced()
    place.now += LEASE
    place.confirmed_at = place.now
    assert place.confirmation.must_wait()
    place.confirmation.on_event(Confirmed(1, LEASE))
    assert not place.confirmation.must_wait()
