"""The shared-state link over a backend with other writers: the same rendezvous, without a server."""

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
    RoundEnded,
)
from rallypoint.failures.cause import Cause
from rallypoint.rendezvous.shared_state import RendezvousBackend, SharedStateLink
from tests.unit.coordinator.test_coordinator_laws import lived
from tests.unit.rendezvous.jobs import EVENTS, SETTINGS

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
    """A backend as a third party would write it. Every third write finds that somebody was faster."""

    def __init__(self, memory: Memory, clumsy: bool = False) -> None:
        self._memory = memory
        self._clumsy = clumsy
        self._writes = 0
        self._seen = 0
        self.read_token = 0

    def be_late(self) -> None:
        """Have the next write find that somebody was faster."""
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
    """One link over the memory, and what it was told."""

    def __init__(self, memory: Memory, job: Settings, name: str, clumsy: bool = False) -> None:
        self.told: queue.SimpleQueue[Notification] = queue.SimpleQueue()
        self.backend = MemoryBackend(memory, clumsy)
        self.link = SharedStateLink(self.backend, job, NodeId(name, 1, 0), name, self.told.put)

    def join(self, timeout: float = 600.0) -> None:
        self.link.send(JoinRequest(NodeInfo("default", 1, "", 7000), timeout))

    def hears(self) -> Notification:
        return self.told.get(timeout=TIMEOUT)

    def placed(self) -> Placed:
        notice = self.hears()
        assert isinstance(notice, Placed), notice
        return notice


def job(low: int, high: int | None = None, **times: float) -> Settings:
    times = {"last_call_timeout": 0.2, "keep_alive_interval": 0.2, **times}
    return Settings("job", low, high or low, keep_alive_max_attempt=3, counts_heartbeats=True, **times)  # type: ignore[arg-type]


def test_who_loses_a_race_pauses_for_a_random_time_if_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[tuple[float, float]] = []

    def uniform(least: float, longest: float) -> float:
        pauses.append((least, longest))
        return 0.0

    monkeypatch.setattr("random.uniform", uniform)
    for longest in (0.0, 0.5):
        memory = Memory()
        with nodes(memory, job(1, cas_backoff_max_seconds=longest), "a", clumsy=True) as (node,):
            node.backend.be_late()
            node.join()
            node.placed()
        assert memory.lost_races
        assert pauses == [(0, longest)] * len(pauses)
        assert len(pauses) == (memory.lost_races if longest else 0)


@contextmanager
def nodes(memory: Memory, settings: Settings, names: str, clumsy: bool = False) -> Iterator[list[Node]]:
    made = [Node(memory, settings, name, clumsy) for name in names]
    try:
        yield made
    finally:
        for node in made:
            node.link.close()
        assert "rallypoint-shared-state" not in {thread.name for thread in threading.enumerate()}


def test_the_end_of_a_job_concerns_only_who_was_ever_in_it() -> None:
    """Who comes later is refused, and not told how a job has ended that was never its own."""
    memory = Memory()
    memory.blob = encode_state(State(closed=True, verdict=Verdict(Outcome.SUCCEEDED)))
    with nodes(memory, job(1), "a") as (late,):
        late.join()
        refused = late.hears()
        assert isinstance(refused, JoinRefused)
        assert refused.refusal is Refusal.CLOSED


def test_who_succeeded_and_was_taken_out_hears_how_it_goes_on() -> None:
    """It has no place in the round any more, and waits for the others all the same."""
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
            others = {each: held for each, held in state.participants.items() if each.addr == "b"}
            memory.blob = encode_state(state._replace(participants=others))  # as of one that was silent for too long
            memory.token += 1
            memory.lock.notify_all()
            assert memory.lock.wait_for(lambda: a.backend.read_token == memory.token, TIMEOUT)
        b.link.send(Fail(0, CAUSE, 3))
        told = a.hears()
        assert isinstance(told, RoundEnded), told
        assert told.end.reason is Reason.FAILURE


@pytest.mark.parametrize("clumsy", [False, True], ids=["calm", "every third race lost"])
def test_when_the_time_of_one_is_over_all_who_wait_are_told(clumsy: bool) -> None:
    memory = Memory()
    with nodes(memory, job(3), "ab", clumsy) as (a, b):
        b.join()
        a.join(timeout=1.0)
        for node in (a, b):
            refused = node.hears()
            assert isinstance(refused, JoinRefused)
            assert refused.refusal is Refusal.TIMEOUT
            assert refused.progress is not None
            assert (refused.progress.joined, refused.progress.gave_up_by) == (2, "a")
        b.join(timeout=0.5)  # who asks again has its whole time, and is alone
        refused = b.hears()
        assert isinstance(refused, JoinRefused)
        assert refused.progress is not None
        assert (refused.progress.joined, refused.progress.gave_up_by) == (1, "b")


@pytest.mark.parametrize("clumsy", [False, True], ids=["calm", "every third race lost"])
def test_nodes_meet_fail_meet_again_and_succeed(clumsy: bool) -> None:
    memory = Memory()
    with nodes(memory, job(3), "abc", clumsy) as (a, b, c):
        for node in (a, b, c):
            node.join()
        places = [node.placed().placement for node in (a, b, c)]
        assert [each.group_rank for each in places] == [0, 1, 2]
        assert {each.store_address for each in places} == {"a"}
        b.link.send(Fail(0, CAUSE, 1))
        for node in (a, b, c):
            ended = node.hears()
            assert isinstance(ended, RoundEnded)
            assert ended.end.reason is Reason.FAILURE
            node.join()
        assert [node.placed().placement.restarts for node in (a, b, c)] == [1, 1, 1]
        for node in (a, b, c):
            node.link.send(Succeed(1))
        verdicts = [node.hears() for node in (a, b, c)]
        assert all(isinstance(each, JobEnded) and each.verdict.outcome is Outcome.SUCCEEDED for each in verdicts)
    assert not clumsy or memory.lost_races > 3


def test_a_node_whose_heartbeats_stand_still_is_taken_out_by_those_who_watch() -> None:
    memory = Memory()
    with nodes(memory, job(1, 2), "ab") as (a, b):
        a.join()
        b.join()
        assert a.placed().placement.group_world_size == 2
        b.placed()
        # b goes without a word: its thread ends and nobody sends heartbeats for it any more
        b.link._ending.set()
        b.link._requests.put(None)
        ended = a.hears()
        assert isinstance(ended, RoundEnded)
        assert ended.end.reason is Reason.LOST
        a.join()
        assert a.placed().placement.group_world_size == 1


def test_a_join_that_comes_to_nothing_is_taken_back() -> None:
    memory = Memory()
    with nodes(memory, job(2), "a") as (a,):
        a.join(timeout=0.3)
        refused = a.hears()
        assert isinstance(refused, JoinRefused)
        assert refused.refusal is Refusal.TIMEOUT
    assert memory.blob is not None
    assert not decode_state(memory.blob).participants


def test_a_backend_out_of_reach_at_the_end_does_not_hold_up_the_close() -> None:
    memory = Memory()
    with nodes(memory, job(1), "a") as (a,):
        a.join()
        a.placed()
        memory.down = True


def test_a_state_of_somebody_else_is_refused_with_a_sentence() -> None:
    for blob in (b"\x80\x04\x95 a pickle", b"", b"rallypoint-state-2:\x93", b"rallypoint-state-10:"):
        with pytest.raises(RendezvousStateError, match="the shared rendezvous state"):
            decode_state(blob)


@given(SETTINGS, EVENTS)
def test_states_go_there_and_back(settings: Settings, events: list[tuple[str, int, int]]) -> None:
    for state in lived(settings, events).states:
        assert decode_state(encode_state(state)) == state


def test_a_state_error_ends_the_link_with_its_sentence() -> None:
    memory = Memory()
    memory.blob, memory.token = b"something else", 1
    with nodes(memory, job(1), "a") as (a,):
        a.join()
        lost = a.hears()
        assert isinstance(lost, LinkLost)
        assert "did not write" in lost.detail


def test_what_was_asked_while_the_backend_was_away_is_done_when_it_is_back() -> None:
    memory = Memory()
    memory.down = True
    with nodes(memory, job(1), "a") as (a,):
        a.join()
        memory.down = False
        a.placed()


def test_any_text_of_a_node_can_be_kept_and_a_number_that_cannot_ends_the_link() -> None:
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
