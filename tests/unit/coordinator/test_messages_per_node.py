"""The number of messages of a node does not depend on the number of nodes."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from rallypoint.agent.third_party import exchange, exit_barrier
from rallypoint.base.clock import Deadline
from rallypoint.base.descriptors import allow_descriptors
from rallypoint.base.endpoint import Endpoint
from rallypoint.control.client.dialing import DialTarget, FixedEndpoint
from rallypoint.control.client.tcp_link import TcpLink
from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.membership.state import Fail, NodeId, NodeInfo, Settings, Succeed
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.messages import (
    Deliver,
    JobEnded,
    JoinRequest,
    LinkOpened,
    NextStore,
    Notification,
    Placed,
    Request,
    RoundEnded,
)
from rallypoint.failures.cause import Cause
from rallypoint.store import plain
from rallypoint.store.plain import HashStore
from rallypoint.store.wire import Op
from tests.unit.coordinator.sockets import serving

SIZES = (2, 64, 512)
TIMEOUT = 120.0
NO_HEARTBEATS = 3600.0
"""A lease in which no heartbeat falls into a test."""
CAUSE = Cause(1, 0, "host", 4711, 1, "ValueError: boom", "Traceback ...", 0.0, "")


class CountingDispatcher(Dispatcher):
    """A dispatcher that counts requests by session and kind."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.said: dict[int, Counter[str]] = {}

    def receive(self, session: int, request: Request) -> bool:
        self.said.setdefault(session, Counter())[type(request).__name__] += 1
        return super().receive(session, request)


class Nodes:
    """Many nodes of one process, each with its own link, and their notifications."""

    def __init__(self, count: int, endpoint: Endpoint, settings: Settings) -> None:
        self._heard: list[list[Notification]] = [[] for _ in range(count)]
        self._changed = threading.Condition()
        deadline = Deadline.after(TIMEOUT)
        self.links = [
            TcpLink(FixedEndpoint(DialTarget(endpoint)), settings, NodeId("", 1, node), self._listener(node), deadline)
            for node in range(count)
        ]

    def _listener(self, node: int) -> Deliver:
        def deliver(notice: Notification) -> None:
            if isinstance(notice, LinkOpened):
                return  # from the link itself
            with self._changed:
                self._heard[node].append(notice)
                self._changed.notify_all()

        return deliver

    def say(self, request: Callable[[int], Request]) -> None:
        for node, link in enumerate(self.links):
            link.send(request(node))

    def hear(self, kind: type, times: int = 1) -> None:
        """Wait until every node got this many notifications of a kind."""

        def all_have() -> bool:
            return all(sum(isinstance(each, kind) for each in heard) == times for heard in self._heard)

        with self._changed:
            assert self._changed.wait_for(all_have, TIMEOUT)

    @property
    def told(self) -> list[dict[str, int]]:
        """The number of notifications by kind, for each node."""
        return [dict(Counter(type(each).__name__ for each in heard)) for heard in self._heard]

    @property
    def largest(self) -> int:
        """The size of the largest notification."""
        return max(len(codec.encode(each)) for heard in self._heard for each in heard)

    def close(self) -> None:
        for link in self.links:
            link.close()


@contextmanager
def met(count: int) -> Iterator[tuple[CountingDispatcher, Nodes]]:
    allow_descriptors(2 * count)
    settings = Settings("job", count, count, lease=NO_HEARTBEATS)
    dispatcher = CountingDispatcher(settings)
    with (
        serving(dispatcher) as server,
        closing(Nodes(count, Endpoint("127.0.0.1", server.port), settings)) as nodes,
    ):
        yield dispatcher, nodes


def join(node: int) -> JoinRequest:
    return JoinRequest(NodeInfo("default", 8, "", 1024 + node), TIMEOUT, keeps_place=True)


def test_the_coordinator_s_messages_do_not_depend_on_the_number_of_nodes() -> None:
    sizes: set[int] = set()
    for count in SIZES:
        with met(count) as (dispatcher, nodes):
            nodes.say(join)
            nodes.hear(Placed)
            nodes.links[0].send(NextStore(0, 2048))
            nodes.links[0].send(Fail(0, CAUSE, 3, restarts_workers=True))
            nodes.hear(RoundEnded)
            nodes.hear(Placed, times=2)
            nodes.say(lambda _node: Succeed(1))
            nodes.hear(JobEnded)
            *others, failed = sorted(map(dict, dispatcher.said.values()), key=len)
            assert others == [{"JoinRequest": 1, "Succeed": 1}] * (count - 1)
            assert failed == {"JoinRequest": 1, "NextStore": 1, "Fail": 1, "Succeed": 1}
            assert nodes.told == [{"Placed": 2, "RoundEnded": 1, "JobEnded": 1}] * count
            sizes.add(nodes.largest)
    assert max(sizes) - min(sizes) <= 16  # numbers grow by some digits, and nothing else does


def test_store_requests_do_not_depend_on_the_number_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the handler of a third party; see `agent.third_party`."""
    counted: Counter[int] = Counter()
    execute = plain._Shared.execute

    def counting(shared: plain._Shared, client: threading.Event, op: Op, *fields: Any) -> bytes:
        counted[threading.get_ident()] += 1
        return execute(shared, client, op, *fields)

    monkeypatch.setattr(plain._Shared, "execute", counting)
    most = []
    for count in SIZES:
        asked = asked_by_each(count, counted)
        assert len(asked) == count
        most.append(max(asked[rank] for rank in range(1, count)))
        assert asked[0] <= 4 * count + 16  # rank 0 reads the entries of all
    assert max(most) <= min(most) + 1  # the last at the barrier announces it


def asked_by_each(count: int, counted: Counter[int]) -> dict[int, int]:
    """The number of store requests of each node, for its ranks and the exit barrier."""
    store, barrier = HashStore(timeout=TIMEOUT), threading.Barrier(count)
    asked: dict[int, int] = {}

    def node(rank: int) -> None:
        counted[threading.get_ident()] = 0
        barrier.wait(TIMEOUT)
        exchange(store, rank, count, "default", 8, restarts=0)
        exit_barrier(store, count, TIMEOUT)
        asked[rank] = counted[threading.get_ident()]

    threads = [threading.Thread(target=node, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + TIMEOUT
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return asked
