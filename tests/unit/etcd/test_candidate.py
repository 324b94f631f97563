"""Candidates on a real etcd, while their requests fail in one way each."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from rallypoint.base.endpoint import host_name
from rallypoint.control.election import journal as journal_module
from rallypoint.control.election.journal import Journal
from rallypoint.control.election.journal_writer import JournalWriter
from rallypoint.control.election.keys import ElectionKeys, decode_leader
from rallypoint.control.election.leader_resolver import LeaderResolver
from rallypoint.control.election.machine import Election
from rallypoint.control.election.shell import Candidate
from rallypoint.control.election.steps import Effect, Event, Fence, Takeover
from rallypoint.control.etcd.api import (
    EtcdRefused,
    EtcdUnreachable,
    TxnResult,
)
from rallypoint.control.membership.state import NodeId, Settings, State
from rallypoint.control.protocol.codec import encode_state
from rallypoint.rendezvous.backends.options import control_listeners
from rallypoint.rendezvous.params import RendezvousParameters
from tests.etcd_client import WritingClient as EtcdClient
from tests.etcd_cluster import EtcdCluster
from tests.relay import Relay
from tests.waiting import until

TIMEOUT = 120.0
SOON = 0.05
LISTEN = partial(control_listeners, RendezvousParameters("etcd", "here", "job", 1, 4), port=0)


@pytest.fixture(name="keys")
def _keys(prefix: bytes) -> ElectionKeys:
    return ElectionKeys.for_job(prefix.decode(), "job")


class Agent:
    """A candidate, and what it knows of the coordinator."""

    def __init__(
        self,
        connect: Callable[[], EtcdClient],
        keys: ElectionKeys,
        lease: float,
        find_addresses: Callable[[], list[str]],
    ) -> None:
        self.address = LeaderResolver("here")
        self.told: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.address.on_move = lambda: self.told.put(None)
        settings = Settings("job", 1, 4, lease=lease)
        own = NodeId("", os.getpid(), 0, host_name())
        self.candidate = Candidate(connect, keys, settings, self.address, find_addresses, LISTEN, own)

    def sees_a_coordinator(self) -> None:
        self.told.get(timeout=TIMEOUT)
        while self.address.resolve() is None:  # it was told why there is none
            self.told.get(timeout=TIMEOUT)


@contextmanager
def standing(
    connect: Callable[[], EtcdClient],
    keys: ElectionKeys,
    lease: float = 30.0,  # which nobody is to lose on a busy machine
    find_addresses: Callable[[], list[str]] = lambda: ["127.0.0.1"],
) -> Iterator[Agent]:
    agent = Agent(connect, keys, lease, find_addresses)
    agent.candidate.start()
    try:
        yield agent
    finally:
        agent.candidate.close()


def test_who_cannot_register_yet_waits_quietly(
    etcd: EtcdCluster, keys: ElectionKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[Event] = []
    tried: list[int] = []
    step = Election.step

    def noted(self: Election, event: Event, now: float) -> list[Effect]:
        steps.append(event)
        return step(self, event, now)

    class Deaf(EtcdClient):
        def txn(self, *given: Any, **named: Any) -> TxnResult:
            tried.append(len(steps))
            raise EtcdUnreachable("it is away")

    monkeypatch.setattr(Election, "step", noted)
    with standing(lambda: Deaf(etcd.endpoints), keys, lease=1.0):
        until(lambda: len(tried) > 4)
    assert tried[4] - tried[0] < 100, "it is not woken again and again between four requests"


def test_an_etcd_that_takes_a_second_for_each_answer_has_a_coordinator_elected(
    etcd: EtcdCluster, keys: ElectionKeys
) -> None:
    """A third of the lease; no member is given up for it, and the lease is kept alive during the takeover."""
    with (
        Relay(etcd.members[0].endpoint, delay=1.0) as relay,
        standing(lambda: EtcdClient([relay.endpoint], timeout_s=3.0), keys, lease=3.0) as agent,
    ):
        until(lambda: agent.candidate.is_leader)


def test_what_nobody_foresaw_is_told_and_tried_again(
    etcd: EtcdCluster, keys: ElectionKeys, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(EtcdClient):
        odd = 1

        def lease_grant(self, *given: Any, **named: Any) -> int:
            if Odd.odd:
                Odd.odd -= 1
                raise RuntimeError("can't start new thread")
            return super().lease_grant(*given, **named)

    with standing(lambda: Odd(etcd.endpoints), keys) as agent:
        until(lambda: "can't start new thread" in agent.address.unresolved_reason())
        agent.sees_a_coordinator()
    assert "can't start new thread" in caplog.text


def test_who_cannot_even_begin_says_so(keys: ElectionKeys) -> None:
    def connect() -> EtcdClient:
        raise OSError(24, "Too many open files")

    with standing(connect, keys) as agent:
        agent.told.get(timeout=TIMEOUT)
        assert "Too many open files" in agent.address.unresolved_reason()


def test_the_same_refusal_is_not_told_every_few_seconds(
    etcd: EtcdCluster, keys: ElectionKeys, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rallypoint.control.election.machine.LONG_PAUSE", 0.05)
    asked = []

    class Refused(EtcdClient):
        def lease_grant(self, *given: Any, **named: Any) -> int:
            asked.append(1)
            raise EtcdRefused("etcd answered 'permission denied'")

    with standing(lambda: Refused(etcd.endpoints), keys):
        until(lambda: len(asked) > 20)
    assert 0 < caplog.text.count("permission denied") < 3


def test_addresses_are_looked_for_again_where_etcd_s_name_was_not_known_at_first(
    etcd: EtcdCluster, client: EtcdClient, keys: ElectionKeys
) -> None:
    known = threading.Event()

    class Late(EtcdClient):
        def lease_grant(self, *given: Any, **named: Any) -> int:
            if not known.is_set():
                known.set()
                raise EtcdUnreachable("its name is not known yet")
            return super().lease_grant(*given, **named)

    with standing(
        lambda: Late(etcd.endpoints), keys, find_addresses=lambda: ["192.0.2.1"] if known.is_set() else ["127.0.0.1"]
    ) as agent:
        agent.sees_a_coordinator()
        post = decode_leader(client.range(keys.leader).kvs[0].value)
        assert post is not None
        assert post.addresses == ("192.0.2.1",)


def test_a_journal_that_breaks_is_no_coordinator_s(etcd: EtcdCluster, client: EtcdClient, keys: ElectionKeys) -> None:
    why: queue.SimpleQueue[str] = queue.SimpleQueue()

    def breaks(_number: int) -> None:
        raise RuntimeError("nobody foresaw this")

    made = client.put(keys.leader, b"")
    journal = Journal(keys, Fence((keys.leader, made)), "me", Takeover("me", State(), 0, 0, 0))
    writer = JournalWriter(client, journal, why.put)
    writer.start(breaks)
    writer.append(1, State(round=1), 1)
    assert "nobody foresaw this" in why.get(timeout=TIMEOUT)
    writer.close()
    client.delete(keys.root.encode(), prefix=True)


def test_the_coordinator_does_not_wait_while_its_state_is_encoded(
    client: EtcdClient, keys: ElectionKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 12,500 nodes that takes a tenth of a second, in which their heartbeats come."""
    begun, may_end = threading.Event(), threading.Event()

    def encoding(state: State) -> bytes:
        begun.set()
        assert may_end.wait(TIMEOUT)
        return encode_state(state)

    monkeypatch.setattr(journal_module, "encode_state", encoding)
    made = client.put(keys.leader, b"")
    journal = Journal(keys, Fence((keys.leader, made)), "me", Takeover("me", State(), 0, 0, 0))
    writer = JournalWriter(client, journal, lambda _why: None)
    written: queue.SimpleQueue[int] = queue.SimpleQueue()
    writer.start(written.put)
    writer.append(1, State(round=1), 1)
    assert begun.wait(TIMEOUT)
    appending = threading.Thread(target=writer.append, args=(2, State(round=2), 2), daemon=True)
    appending.start()
    appending.join(TIMEOUT)
    assert not appending.is_alive(), "it waits for the encoding"
    may_end.set()
    assert [written.get(timeout=TIMEOUT) for _ in range(2)] == [1, 2]
    writer.close()
    client.delete(keys.root.encode(), prefix=True)
