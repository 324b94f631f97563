"""A round that ended before one of its nodes saw it: nothing of it is used again."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from rallypoint.base.clock import Deadline
from rallypoint.control.membership.state import Fail, NodeId, NodeInfo, Settings
from rallypoint.control.protocol.codec import decode_state
from rallypoint.control.protocol.messages import Deliver, Link, Notification, Placed, Placement, RoundEnded
from rallypoint.rendezvous.elastic import ControlPlane, ElasticHandler
from rallypoint.rendezvous.shared_state import SharedStateLink
from rallypoint.rendezvous.worker_stores import AgentStoreSupply
from tests.unit.rendezvous.test_shared_state_link import CAUSE, TIMEOUT, Memory, MemoryBackend, job

WITHOUT_HEARTBEATS = job(2, keep_alive_interval=600.0)
"""A heartbeat is a write, which would show the changes of others."""


class SlowBackend(MemoryBackend):
    """A backend whose reads can lag behind."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory)
        self.lags = False
        self._seen_last: tuple[bytes, int] | None = None

    def get_state(self) -> tuple[bytes, int] | None:
        if not self.lags:
            self._seen_last = super().get_state()
        return self._seen_last


class StateInMemory(ControlPlane):
    """A node's link to a state in memory."""

    def __init__(self, backend: SlowBackend, name: str, settings: Settings) -> None:
        super().__init__(settings)
        self._backend = backend
        self._name = name

    def open(self, deliver: Deliver, deadline: Deadline) -> Link:
        return SharedStateLink(self._backend, self.settings, NodeId(self._name, 1, 0), "127.0.0.1", deliver)


class Node:
    """A handler over the memory, and its notifications."""

    def __init__(self, memory: Memory, name: str) -> None:
        self.told: queue.SimpleQueue[Notification] = queue.SimpleQueue()
        self.backend = SlowBackend(memory)
        control = StateInMemory(self.backend, name, WITHOUT_HEARTBEATS)
        self.handler = ElasticHandler("memory", control, AgentStoreSupply("127.0.0.1"))
        self.handler.listen(self.told.put)

    def join(self) -> None:
        self.handler.join(NodeInfo("default", 1, "", 0))

    def placed(self) -> Placement:
        notice = self.told.get(timeout=TIMEOUT)
        assert isinstance(notice, Placed), notice
        return notice.placement

    def round_ended(self) -> int:
        notice = self.told.get(timeout=TIMEOUT)
        assert isinstance(notice, RoundEnded), notice
        return notice.end.round


@contextmanager
def two_nodes(memory: Memory) -> Iterator[tuple[Node, Node]]:
    a, b = Node(memory, "a"), Node(memory, "b")
    try:
        yield a, b
    finally:
        for node in (a, b):
            node.backend.lags = False
            node.handler.listen(None)
            node.handler.shutdown()


def until_joined(memory: Memory) -> None:
    """Wait until one node has joined."""

    def has_joined() -> bool:
        return memory.blob is not None and len(decode_state(memory.blob).participants) == 1

    with memory.lock:
        assert memory.lock.wait_for(has_joined, TIMEOUT)


def miss_round(memory: Memory, a: Node, b: Node) -> Placement:
    """Complete and end round 0 before `a`, which hosts its store, has seen it. Returns the place of `b`."""
    until_joined(memory)
    a.backend.lags = True
    b.join()
    place = b.placed()
    assert (place.round, place.group_rank) == (0, 1)
    b.handler.send(Fail(0, CAUSE, 3))
    assert b.round_ended() == 0
    return place


def test_a_node_that_missed_its_round_joins_with_a_new_worker_store() -> None:
    memory = Memory()
    with two_nodes(memory) as (a, b):
        a.join()
        first = miss_round(memory, a, b)
        b.join()
        until_joined(memory)
        a.backend.lags = False
        assert a.round_ended() == 0
        a.join()
        second = a.placed()
        assert (second.round, second.group_rank, second.restarts) == (1, 0, 1)
        assert b.placed().store_port == second.store_port != first.store_port


def test_a_waiting_handler_joins_again_by_itself() -> None:
    memory = Memory()
    with two_nodes(memory) as (a, b), ThreadPoolExecutor(1) as pool:
        a.handler.listen(None)
        waiting = pool.submit(a.handler.next_rendezvous)
        first = miss_round(memory, a, b)
        a.backend.lags = False
        b.join()
        info = waiting.result(TIMEOUT)
        assert (info.rank, info.world_size) == (0, 2)
        assert info.bootstrap_store_info is not None
        assert b.placed().store_port == info.bootstrap_store_info.master_port != first.store_port
