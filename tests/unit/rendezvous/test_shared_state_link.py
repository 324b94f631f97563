"""The link over a shared state: the same rendezvous without a server, with several writers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given

from rallypoint.control.membership.state import (
    Fail,
    NodeId,
    NodeInfo,
    Outcome,
    Reason,
    Refusal,
    RoundEnd,
    Settings,
    State,
    Succeed,
    Verdict,
)
from rallypoint.control.protocol.codec import decode_state, encode_state
from rallypoint.control.protocol.errors import RendezvousConnectionError, RendezvousStateError
from rallypoint.control.protocol.messages import (
    JobEnded,
    JoinRefused,
    JoinRequest,
    LinkLost,
    NextStore,
    NodeReport,
    Notification,
    Placed,
    Placement,
    Progress,
    RoundEnded,
)
from rallypoint.failures.cause import Cause
from rallypoint.rendezvous.shared_state import RendezvousBackend, SharedStateLink
from tests.unit.coordinator.test_coordinator_laws import lived
from tests.unit.rendezvous.jobs import EVENTS, SETTINGS
from tests.waiting import until

TIMEOUT = 120.0
CAUSE = Cause(0, 0, "host", 1, 1, "boom", "", 0.0, "")


class Memory:
    """One blob, and a counter as its fencing token."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.blob: bytes | None = None
        self.token = 0
        self.lost_races = 0
        self.down = False


class MemoryBackend(RendezvousBackend):
    """A backend as a third party would write it. A clumsy one loses every third race."""

    def __init__(self, memory: Memory, clumsy: bool = False) -> None:
        self._memory = memory
        self._clumsy = clumsy
        self._writes = 0
        self._seen = 0
        self.read_token = 0

    def be_late(self) -> None:
        """Lose the race of the next write."""
        self._writes = 2

    @property
    def name(self) -> str:
        return "memory"

    def get_state(self) -> tuple[bytes, int] | None:
        self._check()
        with self._memory.lock:
            self.read_token = self._memory.token
            self._memory.lock.notify_all()
            return None if self._memory.blob is None else (self._memory.blob, self._memory.token)

    def set_state(self, state: bytes, token: object = None) -> tuple[bytes, int, bool] | None:
        self._check()
        self._writes += 1
        memory = self._memory
        with memory.lock:
            beaten = self._clumsy and self._writes % 3 == 0
            if beaten or (memory.token if memory.blob is not None else None) != token:
                memory.lost_races += 1
                return None if memory.blob is None else (memory.blob, memory.token, False)
            memory.blob = state
            memory.token += 1
            memory.lock.notify_all()
            return state, memory.token, True

    def wait_for_change(self, timeout: float) -> bool:
        with self._memory.lock:
            changed = self._memory.lock.wait_for(lambda: self._memory.token != self._seen, timeout)
            self._seen = self._memory.token
            return changed

    def _check(self) -> None:
        if self._memory.down:
            raise RendezvousConnectionError("the memory is gone")


class Node:
    """A link over the memory, and its notifications."""

    def __init__(self, memory: Memory, job: Settings, name: str, clumsy: bool = False) -> None:
        self.told: queue.SimpleQueue[Notification] = queue.SimpleQueue()
        self.backend = MemoryBackend(memory, clumsy)
        self.link = SharedStateLink(self.backend, job, NodeId(name, 1, 0), name, self.told.put)

    def join(self, timeout: float = 600.0) -> None:
        self.link.send(JoinRequest(NodeInfo("default", 1, "", 7000), timeout))

    def hears(self) -> Notification:
        return self.told.get(timeout=TIMEOUT)

    def refused(self) -> Progress:
        """The progress with which its join timed out."""
        notice = self.hears()
        assert isinstance(notice, JoinRefused), notice
        assert notice.refusal is Refusal.TIMEOUT
        assert notice.progress is not None
        return notice.progress

    def ended(self) -> RoundEnd:
        notice = self.hears()
        assert isinstance(notice, RoundEnded), notice
        return notice.end

    def placed(self) -> Placement:
        notice = self.hears()
        assert isinstance(notice, Placed), notice
        return notice.placement


def job(low: int, high: int | None = None, **times: float) -> Settings:
    times = {"last_call_timeout": 0.2, "keep_alive_interval": 0.2, **times}
    return Settings("job", low, high or low, keep_alive_max_attempt=3, counts_heartbeats=True, **times)  # type: ignore[arg-type]


@pytest.mark.parametrize("longest", [0.0, 0.5])
def test_lost_races_are_followed_by_random_pauses_if_configured(
    longest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[tuple[float, float]] = []

    def uniform(least: float, most: float) -> float:
        pauses.append((least, most))
        return 0.0

    monkeypatch.setattr("random.uniform", uniform)
    memory = Memory()
    with nodes(memory, job(1, cas_backoff_max_seconds=longest), "a", clumsy=True) as (node,):
        node.backend.be_late()
        node.join()
        node.placed()
    assert memory.lost_races
    assert pauses == [(0, longest)] * (memory.lost_races if longest else 0)


@contextmanager
def nodes(memory: Memory, settings: Settings, names: str, clumsy: bool = False) -> Iterator[list[Node]]:
    made = [Node(memory, settings, name, clumsy) for name in names]
    try:
        yield made
    finally:
        for node in made:
            node.link.close()
        assert not {"rallypoint-shared-state", "rallypoint-watch"} & {thread.name for thread in threading.enumerate()}


def test_a_node_that_was_never_in_the_job_is_refused() -> None:
    memory = Memory()
    memory.blob = encode_state(State(closed=True, verdict=Verdict(Outcome.SUCCEEDED)))
    with nodes(memory, job(1), "a") as (late,):
        late.join()
        refused = late.hears()
        assert isinstance(refused, JoinRefused)
        assert refused.refusal is Refusal.CLOSED


def test_a_removed_node_that_succeeded_hears_of_the_next_round() -> None:
    memory = Memory()
    with nodes(memory, job(2), "ab") as (a, b):
        a.join()
        b.join()
        a.placed()
        b.placed()
        a.link.send(Succeed(0))
        with memory.lock:
            assert memory.lock.wait_for(lambda: decode_state(memory.blob or b"").succeeded, TIMEOUT)
            state = decode_state(memory.blob or b"")
            others = {node: place for node, place in state.participants.items() if node.addr == "b"}
            memory.blob = encode_state(state._replace(participants=others))  # as if `a` had been silent
            memory.token += 1
            memory.lock.notify_all()
            assert memory.lock.wait_for(lambda: a.backend.read_token == memory.token, TIMEOUT)
        b.link.send(Fail(0, CAUSE, 3))
        assert a.ended().reason is Reason.FAILURE


@pytest.mark.parametrize("clumsy", [False, True], ids=["calm", "every third race lost"])
def test_one_join_deadline_ends_the_wait_of_all(clumsy: bool) -> None:
    memory = Memory()
    with nodes(memory, job(3), "ab", clumsy) as (a, b):
        b.join()
        a.join(timeout=1.0)
        for node in (a, b):
            progress = node.refused()
            assert (progress.joined, progress.gave_up_by) == (2, "a")
        b.join(timeout=0.5)  # a new join has all its time, and is alone
        progress = b.refused()
        assert (progress.joined, progress.gave_up_by) == (1, "b")
    assert memory.blob is not None
    assert not decode_state(memory.blob).participants, "the joins are taken back"


@pytest.mark.parametrize("clumsy", [False, True], ids=["calm", "every third race lost"])
def test_nodes_meet_fail_meet_again_and_succeed(clumsy: bool) -> None:
    memory = Memory()
    with nodes(memory, job(3), "abc", clumsy) as (a, b, c):
        for node in (a, b, c):
            node.join()
        places = [node.placed() for node in (a, b, c)]
        assert [place.group_rank for place in places] == [0, 1, 2]
        assert {place.store_address for place in places} == {"a"}
        b.link.send(Fail(0, CAUSE, 1))
        for node in (a, b, c):
            assert node.ended().reason is Reason.FAILURE
            node.join()
        assert [node.placed().restarts for node in (a, b, c)] == [1, 1, 1]
        for node in (a, b, c):
            node.link.send(Succeed(1))
        verdicts = [node.hears() for node in (a, b, c)]
        assert all(isinstance(end, JobEnded) and end.verdict.outcome is Outcome.SUCCEEDED for end in verdicts)
    assert not clumsy or memory.lost_races > 3


def test_a_node_without_heartbeats_is_lost() -> None:
    memory = Memory()
    with nodes(memory, job(1, 2), "ab") as (a, b):
        a.join()
        b.join()
        assert a.placed().group_world_size == 2
        b.placed()
        b.link._ending.set()  # its thread ends without a request, and its heartbeats stop
        b.link._requests.put(None)
        assert a.ended().reason is Reason.LOST
        a.join()
        assert a.placed().group_world_size == 1


def test_a_backend_may_be_out_of_reach_at_the_start_and_at_the_end() -> None:
    memory = Memory()
    memory.down = True
    with nodes(memory, job(1), "a") as (a,):
        a.join()
        memory.down = False
        a.placed()
        memory.down = True


def test_foreign_states_are_refused() -> None:
    for blob in (b"\x80\x04\x95 a pickle", b"", b"rallypoint-state-2:\x93", b"rallypoint-state-10:"):
        with pytest.raises(RendezvousStateError, match="the shared rendezvous state"):
            decode_state(blob)


@given(SETTINGS, EVENTS)
def test_states_are_decoded_as_encoded(settings: Settings, events: list[tuple[str, int, int]]) -> None:
    for state in lived(settings, events).states:
        assert decode_state(encode_state(state)) == state


def test_a_foreign_state_ends_the_link_and_its_watcher() -> None:
    memory = Memory()
    memory.blob, memory.token = b"something else", 1
    with nodes(memory, job(1), "a") as (a,):
        a.join()
        lost = a.hears()
        assert isinstance(lost, LinkLost)
        assert "did not write" in lost.detail
        until(lambda: "rallypoint-watch" not in {thread.name for thread in threading.enumerate()})


def test_texts_are_cleaned_and_numbers_out_of_range_end_the_link() -> None:
    memory = Memory()
    with nodes(memory, job(1), "a") as (node,):
        node.link.send(JoinRequest(NodeInfo("default", 1, "", 7000, program="caf\udce9.py"), 600.0))
        node.placed()
        assert memory.blob is not None
        assert list(decode_state(memory.blob).programs.values()) == ["caf?.py"]
        node.link.send(NodeReport(0, (1 << 40,)))  # nothing that the job needs
        node.link.send(NextStore(0, 70_000))
        lost = node.hears()
        assert isinstance(lost, LinkLost)
        assert "a NextStore whose store_port is 70000 is refused" in lost.detail
