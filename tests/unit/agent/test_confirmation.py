"""An agent asks whether its place is still valid if the last answer may be older than the lease."""

from __future__ import annotations

import math

import pytest

from rallypoint.agent.confirmation import Confirmation
from rallypoint.control.protocol.messages import Confirmed, ConfirmRequest, Request

LEASE = 3.0


class Place:
    """A node with a clock that a test moves; keeps the requests that it sends, and its fences."""

    def __init__(self, lease: float = LEASE, *, fenced: bool = False) -> None:
        self.now = 100.0
        self.lease = lease
        self.confirmed_at = -math.inf
        self.sent: list[Request] = []
        self.fences: list[float] = []
        self.confirmation = Confirmation(self, self, *[self.fences.append] * fenced)
        self.confirmation.requests_place()

    def monotonic(self) -> float:
        return self.now

    def send(self, request: Request) -> None:
        self.sent.append(request)

    def must_wait_after(self, seconds: float) -> bool:
        self.now += seconds
        return self.confirmation.must_wait()

    def step_after(self, seconds: float) -> None:
        self.now += seconds
        self.confirmation.step()

    def answer(self, number: int, valid_for: float = math.inf) -> None:
        self.confirmation.on_event(Confirmed(number, valid_for))


def test_answers_are_as_old_as_their_requests() -> None:
    place = Place()
    assert not place.must_wait_after(LEASE)
    assert not place.sent
    assert place.must_wait_after(0.1)
    assert place.must_wait_after(0.0)
    assert place.sent == [ConfirmRequest(1)]
    place.now += LEASE + 0.1  # the answer was in the buffer of a frozen process
    for number, waits in ((1, True), (1, True), (2, False)):
        place.answer(number)
        assert place.must_wait_after(0.0) is waits
    assert place.sent == [ConfirmRequest(1), ConfirmRequest(2)]


def test_heartbeats_confirm_the_place_and_the_end_of_the_round_ends_the_wait() -> None:
    place = Place()
    place.confirmed_at = place.now + 10.0
    assert not place.must_wait_after(10.0 + LEASE)
    assert place.must_wait_after(0.1)
    assert place.sent == [ConfirmRequest(1)]
    place.confirmation.awaited = False
    place.confirmation.requests_place()
    assert not place.must_wait_after(0.0)
    assert place.sent == [ConfirmRequest(1)]
    assert not Place(math.inf).must_wait_after(1e6), "without a lease"


def test_the_fence_is_a_lease_after_the_request_for_the_place() -> None:
    place = Place(fenced=True)
    place.now += 1.0
    place.confirmation.workers_start()
    assert place.fences == [100.0 + LEASE]
    assert place.confirmation.wake_in() == LEASE / 4
    place.step_after(LEASE / 4)
    assert place.sent == [ConfirmRequest(1)]
    assert not place.confirmation.has_fenced()
    place.now = 100.0 + LEASE
    assert place.confirmation.has_fenced()
    place.now += 10.0
    place.answer(1)
    assert place.confirmation.has_fenced(), "an answer that is read late does not help"


@pytest.mark.parametrize(
    ("answers", "fence"),
    [([Confirmed(2), Confirmed(1)], 102.0 + LEASE), ([Confirmed(1, 2.5)], 101.0 + 2.5)],
    ids=["lease", "shorter lease of an elected coordinator"],
)
def test_answers_move_the_fence(answers: list[Confirmed], fence: float) -> None:
    place = Place(fenced=True)
    place.confirmation.workers_start()
    place.step_after(1.0)
    place.step_after(1.0)
    for answer in answers:
        place.confirmation.on_event(answer)
    assert place.fences == [100.0 + LEASE, fence]
    place.now = fence
    assert place.confirmation.has_fenced()


def test_without_workers_there_is_no_fence() -> None:
    place = Place(fenced=True)
    place.confirmation.workers_start()
    place.confirmation.workers_ended()
    place.confirmation.workers_ended()
    assert place.fences == [100.0 + LEASE, math.inf]
    place.step_after(10.0)
    assert not place.sent
    assert not place.confirmation.has_fenced()


def test_fenced_workers_start_with_half_a_lease_left_and_not_on_a_heartbeat() -> None:
    place = Place(fenced=True)
    assert not place.must_wait_after(LEASE / 2)
    place.confirmed_at = place.now  # a heartbeat's answer does not say how long it is valid
    assert place.must_wait_after(0.1)
    place.answer(1, LEASE)
    assert not place.must_wait_after(0.0)
