"""Agents that stand for election in a real etcd, while what they ask of it goes wrong in one way each."""

from __future__ import annotations

import os
import queue
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rallypoint.base.endpoint import host_name
from rallypoint.control.election.journal import Journal
from rallypoint.control.election.keys import ElectionKeys, Snapshot, decode_leader, encode_node, encode_snapshot
from rallypoint.control.election.leader_resolver import LeaderResolver
from rallypoint.control.election.machine import Election
from rallypoint.control.election.shell import Candidate, JournalWriter
from rallypoint.control.election.steps import Effect, Event, Fence
from rallypoint.control.election.takeover import Takeover
from rallypoint.control.etcd.api import (
    EtcdRefused,
    EtcdUnreachable,
    Operation,
    Put,
    TxnResult,
    WatchCompacted,
    WatchEnd,
    WatchEvent,
)
from rallypoint.control.etcd.client import Watch
from rallypoint.control.membership.state import NodeId, Settings, State
from rallypoint.control.protocol.codec import encode_state
from rallypoint.rendezvous.backends.options import control_listeners
from rallypoint.rendezvous.params import RendezvousParameters
from tests.etcd_client import WritingClient as EtcdClient
from tests.etcd_cluster import EtcdCluster, running

TIMEOUT = 120.0
SOON = 0.05
LISTEN = partial(control_listeners, RendezvousParameters("etcd", "here", "job", 1, 4), port=0)


@pytest.fixture(name="keys")
def _keys(prefix: bytes) -> ElectionKeys:
    return ElectionKeys.of(prefix.decode(), "job")


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
        while self.address.resolve() is None:  # the lease of the one that was told of is over by now
            self.told.get(timeout=TIMEOUT)


@contextmanager
def standing(
    connect: Callable[[], EtcdClient],
    keys: ElectionKeys,
    lease: float = 2.0,
    find_addresses: Callable[[], list[str]] = lambda: ["127.0.0.1"],
) -> Iterator[Agent]:
    agent = Agent(connect, keys, lease, find_addresses)
    agent.candidate.start()
    try:
        yield agent
    finally:
        agent.candidate.close()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not holds():
        assert time.monotonic() < deadline
        threading.Event().wait(SOON)


def registers(keys: ElectionKeys, then: Sequence[Operation]) -> bool:
    return any(isinstance(each, Put) and each.key.startswith(keys.nodes) for each in then)


@pytest.mark.parametrize("others", [1, 2])
def test_who_was_registered_by_a_sending_whose_answer_was_lost_is_as_old_as_that(
    etcd: EtcdCluster, client: EtcdClient, keys: ElectionKeys, others: int
) -> None:
    """Others came before the second sending: they wait for us, so we must not wait for them."""
    later = [client.lease_grant(60) for _ in range(others)]

    class Twice(EtcdClient):
        def txn(self, compares: Any, then: Sequence[Operation], *more: Any, **named: Any) -> TxnResult:
            first = registers(keys, then) and not compares
            if first:
                super().txn(compares, then, *more, **named)
                for lease in later:
                    client.put(keys.node(lease), encode_node(NodeId("other", lease, 0, "h")), lease)
            return super().txn(compares, then, *more, **named)

    with standing(lambda: Twice(etcd.endpoints), keys) as agent:
        agent.sees_a_coordinator()
        found = client.range(keys.leader).kvs
        post = decode_leader(found[0].value)
        assert post is not None
        assert post.lease not in later
    for lease in later:
        client.lease_revoke(lease)


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


def test_who_is_refused_for_now_does_not_take_the_job_s_state_away(
    etcd: EtcdCluster, client: EtcdClient, keys: ElectionKeys
) -> None:
    refusing = threading.Event()
    refused = threading.Event()

    class Refused(EtcdClient):
        def lease_keep_alive(self, *given: Any, **named: Any) -> int:
            if refusing.is_set():
                raise EtcdRefused("etcd answered 'database space exceeded'")
            return super().lease_keep_alive(*given, **named)

        def lease_revoke(self, lease: int, **named: Any) -> None:
            super().lease_revoke(lease, **named)
            if refusing.is_set():
                refused.set()

    client.put(keys.state, encode_snapshot(Snapshot("met", 1, encode_state(State()))))
    with standing(lambda: Refused(etcd.endpoints), keys, lease=1.0) as agent:
        agent.address.session_opened(NodeId("127.0.0.1", os.getpid(), 0, host_name()), "met")
        agent.sees_a_coordinator()
        refusing.set()
        assert refused.wait(TIMEOUT)
        assert client.range(keys.state).kvs
        refusing.clear()
        agent.sees_a_coordinator()
    assert not client.range(keys.state).kvs


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


def test_a_compacted_watch_over_the_nodes_reads_again_and_goes_on(
    etcd: EtcdCluster, client: EtcdClient, keys: ElectionKeys
) -> None:
    watched: queue.SimpleQueue[int] = queue.SimpleQueue()
    lost: list[Callable[[WatchEnd], None]] = []

    class Compacting(EtcdClient):
        def watch(
            self,
            key: bytes,
            from_revision: int,
            on_events: Callable[[Sequence[WatchEvent]], None],
            on_lost: Callable[[WatchEnd], None],
            *,
            prefix: bool = True,
        ) -> Watch:
            watch = super().watch(key, from_revision, on_events, on_lost, prefix=prefix)
            if key == keys.nodes:
                lost.append(on_lost)
                watched.put(from_revision)
            return watch

    with standing(lambda: Compacting(etcd.endpoints), keys, lease=1.0):
        first = watched.get(timeout=TIMEOUT)
        made = client.put(keys.nodes + b"another", encode_node(NodeId("other", 1, 0, "h")))
        lost.pop()(WatchCompacted(made))
        assert watched.get(timeout=TIMEOUT) > made >= first
    client.delete(keys.nodes + b"another")


def test_the_state_s_lease_is_renewed_by_who_takes_over(
    etcd: EtcdCluster, client: EtcdClient, keys: ElectionKeys
) -> None:
    renewed: queue.SimpleQueue[int] = queue.SimpleQueue()

    class Noted(EtcdClient):
        def lease_keep_alive(self, lease: int, **named: Any) -> int:
            renewed.put(lease)
            return super().lease_keep_alive(lease, **named)

    lease = client.lease_grant(600)
    client.put(keys.state, encode_snapshot(Snapshot("met", 1, encode_state(State()))), lease)
    with ExitStack() as stack:
        stack.callback(client.lease_revoke, lease)
        stack.enter_context(standing(lambda: Noted(etcd.endpoints), keys, lease=1.0))
        seen = {renewed.get(timeout=TIMEOUT) for _ in range(3)}
    assert lease in seen


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


@pytest.mark.etcd
@pytest.mark.process
def test_an_etcd_that_has_lost_everything_is_used_again(tmp_path: Path) -> None:
    keys = ElectionKeys.of("/x", "job")
    with running(tmp_path, 1) as cluster:
        (member,) = cluster.members
        writer = EtcdClient(cluster.endpoints)
        for _ in range(50):
            writer.put(b"filler", b"")
        with standing(lambda: EtcdClient(cluster.endpoints), keys) as agent:
            agent.sees_a_coordinator()
            member.kill()
            shutil.rmtree(tmp_path / "etcd-0" / member.name)
            member.start()
            member.wait_ready()
            agent.sees_a_coordinator()
        writer.close()


def test_who_lives_and_ceases_to_be_the_coordinator_ends_its_lease_before_its_port_refuses(
    etcd: EtcdCluster, client: EtcdClient, keys: ElectionKeys
) -> None:
    refusing = threading.Event()
    listened: queue.SimpleQueue[bool] = queue.SimpleQueue()

    class Refused(EtcdClient):
        def lease_keep_alive(self, *given: Any, **named: Any) -> int:
            if refusing.is_set():
                raise EtcdRefused("etcd answered 'permission denied'")
            return super().lease_keep_alive(*given, **named)

        def lease_revoke(self, lease: int, **named: Any) -> None:
            with socket.socket() as probe:
                listened.put(probe.connect_ex(("127.0.0.1", port)) == 0)
            super().lease_revoke(lease, **named)

    with standing(lambda: Refused(etcd.endpoints), keys, lease=1.0) as agent:
        agent.sees_a_coordinator()
        place = agent.address.resolve()
        assert place is not None
        port = place.endpoint.port
        refusing.set()
        assert listened.get(timeout=TIMEOUT)
        refusing.clear()


def test_a_journal_that_breaks_is_no_coordinator_s(etcd: EtcdCluster, client: EtcdClient, keys: ElectionKeys) -> None:
    why: queue.SimpleQueue[str] = queue.SimpleQueue()

    def breaks(_number: int) -> None:
        raise RuntimeError("nobody foresaw this")

    made = client.put(keys.leader, b"")
    journal = Journal(keys, Fence((keys.leader, made)), "me", Takeover("me", State(), 0, 0, 0))
    writer = JournalWriter(client, journal, why.put)
    writer.start(breaks)
    writer.append(1, State(round=1))
    assert "nobody foresaw this" in why.get(timeout=TIMEOUT)
    writer.close()
    client.delete(keys.root.encode(), prefix=True)
