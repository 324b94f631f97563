"""Unauthenticated nodes on machines without a node of the job can neither end nor change it."""

from __future__ import annotations

import pytest

from rallypoint.control.coordinator.coordinator import Coordinator
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import Close, NodeId, NodeInfo, Outcome, PreemptJob, RecordProgress, Settings
from rallypoint.control.protocol.messages import JoinRequest, Placed, Request, ResumeRequest

JOB_WIDE = [Close(), PreemptJob(1.0), RecordProgress(0, 5)]


class Job:
    """A coordinator without a secret, and the sessions at it."""

    def __init__(self, most: int = 2) -> None:
        self.coordinator = Coordinator(Settings("job", 1 if most > 2 else most, most), "c")
        self._number = 0
        self.ended: list[tuple[int, str]] = []
        self.placed: list[int] = []

    def session(self, address: str, *, trusted: bool = False, claims: str = "") -> int:
        self._number += 1
        name = NodeId(claims or address, self._number, 0)
        record = SessionRecord(name, claims or address, "10.0.0.1", address, trusted=trusted)
        self.coordinator.open(self._number, record, 0.0)
        return self._number

    def says(self, session: int, request: Request) -> None:
        ready = self.coordinator.receive(session, request, 0.0)
        self.placed += [number for number, message in ready.messages if isinstance(message, Placed)]
        self.ended += ready.ended

    def join(self, session: int) -> None:
        self.says(session, JoinRequest(NodeInfo("default", 1, "", 7000), 60.0))

    def running(self) -> tuple[int, int]:
        """Two nodes of a round: of the coordinator's own user, and of another host."""
        first, second = self.session("127.0.0.1", trusted=True), self.session("10.0.0.2")
        self.join(first)
        self.join(second)
        assert sorted(self.placed) == [first, second]
        return first, second

    def is_changed(self) -> bool:
        state = self.coordinator.state
        return state.closed or state.is_preempted or state.progress.step >= 0


@pytest.mark.parametrize("request_", JOB_WIDE, ids=lambda each: type(each).__name__)
def test_strangers_cannot_end_or_change_a_running_job(request_: Request) -> None:
    job = Job()
    job.running()
    stranger = job.session("10.0.0.9", claims="10.0.0.2")  # a node may claim any address
    job.says(stranger, request_)
    assert not job.is_changed()
    # A node that was drained may still report progress: only a request that ends the job ends the session.
    only_reports = isinstance(request_, RecordProgress)
    assert [number for number, why in job.ended if "SECRET" in why] == ([] if only_reports else [stranger])
    waits = job.session("10.0.0.9")
    job.join(waits)
    for _ in range(2):
        job.says(waits, request_)
    assert not job.is_changed()
    recorded = [event for event in job.coordinator.history.events if "may not end or change" in str(event)]
    assert len(recorded) == (0 if only_reports else 1), "once a session"
    assert waits not in [number for number, _ in job.ended], "it may wait for a place"
    job.says(job.session("10.0.0.2"), request_)  # another agent of a host that has a node
    assert job.is_changed()
    job = Job()
    job.running()
    job.says(job.session("10.0.0.9", trusted=True), request_)
    assert job.is_changed(), "an authenticated node may"


def test_before_the_first_round_a_joined_node_may_end_the_job() -> None:
    job = Job()
    job.says(job.session("10.0.0.9"), Close())
    assert not job.is_changed()
    first = job.session("10.0.0.2")
    job.join(first)
    job.says(first, Close())
    verdict = job.coordinator.state.verdict
    assert verdict is not None
    assert verdict.outcome is Outcome.STOPPED


def test_a_claim_of_a_place_elsewhere_is_not_believed_in_a_full_job() -> None:
    job = Job()
    job.running()
    claim = ResumeRequest("other", NodeInfo("default", 1, "", 7000), 1000, 1, 2, failures=1000, origin="other")
    job.says(job.session("10.0.0.9"), claim)
    assert job.coordinator.state.ledger.failures == 0
    assert job.coordinator.state.next_round <= 1


def test_a_new_coordinator_believes_the_nodes_of_the_reported_round() -> None:
    """It knows no address until all nodes are back."""
    job = Job()
    info = NodeInfo("default", 1, "", 7000)
    for rank, address in enumerate(("10.0.0.2", "10.0.0.3")):
        node = job.session(address)
        job.says(node, ResumeRequest("former", info, 3, rank, 2, round_over=False, origin="former"))
    state = job.coordinator.state
    assert state.complete
    assert not any(each.is_placeholder for each in state.participants)
    job.says(job.session("10.0.0.9"), Close())
    assert not job.is_changed()
    job.says(job.session("10.0.0.3"), Close())
    assert job.is_changed()
