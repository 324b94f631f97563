"""Candidates on a real etcd whose requests fail."""

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
from rallypoint.control.etcd.api import EtcdUnreachable, TxnResult
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
    """A candidate, and its knowledge of the coordinator."""

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
        while self.address.resolve() is None:  # the reason why there is none
            self.told.get(timeout=TIMEOUT)


@contextmanager
def standing(
    connect: Callable[[], EtcdClient],
    keys: ElectionKeys,
    lease: float = 30.0,  # long enough for a busy machine
    find_addresses: Callable[[], list[str]] = lambda: ["127.0.0.1"],
) -> Iterator[Agent]:
    agent = Agent(connect, keys, lease, find_addresses)
    agent.candidate.start()
    try:
        yield agent
    finally:
        agent.candidate.close()


def test_a_candidate_that_cannot_register_waits(
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


def test_a_slow_etcd_has_a_coordinator_elected(etcd: EtcdCluster, keys: ElectionKeys) -> None:
    """No member is given up for it, and the lease is renewed during the takeover."""
    with (
        Relay(etcd.members[0].endpoint, delay=1.0) as relay,
        standing(lambda: EtcdClient([relay.endpoint], timeout_s=3.0), keys, lease=3.0) as agent,
    ):
        until(lambda: agent.candidate.is_leader)


def test_unexpected_errors_are_reported_and_retried(
    etcd: EtcdCluster, keys: ElectionKeys, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(EtcdClient):
        errors = 1

        def lease_grant(self, *given: Any, **named: Any) -> int:
            if Odd.errors:
                Odd.errors -= 1
                raise RuntimeError("can't start new thread")
            return super().lease_grant(*given, **named)

    def connect() -> EtcdClient:
        raise OSError(24, "Too many open files")

    with standing(lambda: Odd(etcd.endpoints), keys) as agent:
        until(lambda: "can't start new thread" in agent.address.unresolved_reason())
        agent.sees_a_coordinator()
    assert "can't start new thread" in caplog.text
    with standing(connect, keys) as agent:
        agent.told.get(timeout=TIMEOUT)
        assert "Too many open files" in agent.address.unresolved_reason()


def test_addresses_are_found_again_once_etcd_s_name_is_known(
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


@contextmanager
def journal_writer(client: EtcdClient, keys: ElectionKeys, deposed: Callable[[str], None]) -> Iterator[JournalWriter]:
    fence = Fence((keys.leader, client.put(keys.leader, b"")))
    writer = JournalWriter(client, Journal(keys, fence, "me", Takeover("me", State(), 0, 0, 0)), deposed)
    yield writer
    writer.close()
    client.delete(keys.root.encode(), prefix=True)


def test_an_error_of_the_journal_ends_the_lead(client: EtcdClient, keys: ElectionKeys) -> None:
    why: queue.SimpleQueue[str] = queue.SimpleQueue()

    def breaks(_number: int) -> None:
        raise RuntimeError("unexpected")

    with journal_writer(client, keys, why.put) as writer:
        writer.start(breaks)
        writer.append(1, State(round=1), 1)
        assert "unexpected" in why.get(timeout=TIMEOUT)


def test_the_coordinator_does_not_wait_for_the_encoding_of_its_state(
    client: EtcdClient, keys: ElectionKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 12,500 nodes it takes a tenth of a second, in which their heartbeats arrive."""
    begun, may_end = threading.Event(), threading.Event()

    def encoding(state: State) -> bytes:
        begun.set()
        assert may_end.wait(TIMEOUT)
        return encode_state(state)

    monkeypatch.setattr(journal_module, "encode_state", encoding)
    written: queue.SimpleQueue[int] = queue.SimpleQueue()
    with journal_writer(client, keys, lambda _why: None) as writer:
        writer.start(written.put)
        writer.append(1, State(round=1), 1)
        assert begun.wait(TIMEOUT)
        appending = threading.Thread(target=writer.append, args=(2, State(round=2), 2), daemon=True)
        appending.start()
        appending.join(TIMEOUT)
        assert not appending.is_alive(), "it waits for the encoding"
        may_end.set()
        assert [written.get(timeout=TIMEOUT) for _ in range(2)] == [1, 2]
