"""A round that others complete and end before one of its nodes has looked: no part of it is used again."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from rallypoint.base.clock import Deadline
from rallypoint.control.membership.state import Fail, NodeId, NodeInfo, Settings
from rallypoint.control.protocol.codec import decode_state
from rallypoint.control.protocol.messages import Deliver, Link, Notification, Placed, RoundEnded
from rallypoint.rendezvous.elastic import ControlPlane, ElasticHandler
from rallypoint.rendezvous.shared_state import SharedStateLink
from rallypoint.rendezvous.worker_stores import AgentStoreSupply
from tests.unit.rendezvous.test_shared_state_link import CAUSE, TIMEOUT, Memory, MemoryBackend, job

WITHOUT_HEARTBEATS = job(2, keep_alive_interval=600.0)
"""A heartbeat would be a write, and a write shows what others have done."""


class SlowBackend(MemoryBackend):
    """One whose reads can be made to lag behind."""

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
    """A handler over the memory, and what it was told."""

    def __init__(self, memory: Memory, name: str, settings: Settings) -> None:
        self.told: queue.SimpleQueue[Notification] = queue.SimpleQueue()
        self.backend = SlowBackend(memory)
        control = StateInMemory(self.backend, name, settings)
        self.handler = ElasticHandler("memory", control, AgentStoreSupply("127.0.0.1"))
        self.handler.listen(self.told.put)

    def placed(self) -> Placed:
        notice = self.told.get(timeout=TIMEOUT)
        assert isinstance(notice, Placed), notice
        return notice

    def round_ended(self) -> int:
        notice = self.told.get(timeout=TIMEOUT)
        assert isinstance(notice, RoundEnded), notice
        return notice.end.round


@contextmanager
def two_nodes(memory: Memory) -> Iterator[tuple[Node, Node]]:
    a, b = Node(memory, "a", WITHOUT_HEARTBEATS), Node(memory, "b", WITHOUT_HEARTBEATS)
    try:
        yield a, b
    finally:
        for node in (a, b):
            node.backend.lags = False
            node.handler.listen(None)
            node.handler.shutdown()


def until(memory: Memory, holds: Callable[[int], bool]) -> None:
    """Wait until something holds of the number of participants."""

    def participants() -> int:
        return len(decode_state(memory.blob).participants) if memory.blob is not None else 0

    with memory.lock:
        assert memory.lock.wait_for(lambda: holds(participants()), TIMEOUT)


def test_a_node_that_missed_its_round_joins_anew_with_a_new_worker_store() -> None:
    memory = Memory()
    with two_nodes(memory) as (a, b):
        a.handler.join(NodeInfo("default", 1, "", 0))
        until(memory, lambda count: count == 1)
        a.backend.lags = True
        b.handler.join(NodeInfo("default", 1, "", 0))
        first = b.placed().placement
        assert (first.round, first.group_rank) == (0, 1), "a hosts the store of the round that it does not see"
        b.handler.send(Fail(0, CAUSE, 3))
        assert b.round_ended() == 0
        b.handler.join(NodeInfo("default", 1, "", 0))
        until(memory, lambda count: count == 1)
        a.backend.lags = False
        assert a.round_ended() == 0
        a.handler.join(NodeInfo("default", 1, "", 0))
        second = a.placed().placement
        assert (second.round, second.group_rank) == (1, 0)
        assert b.placed().placement.store_port == second.store_port
        assert second.store_port != first.store_port
        assert second.restarts == 1


def test_who_only_waits_for_a_place_joins_anew_by_itself() -> None:
    memory = Memory()
    with two_nodes(memory) as (a, b), ThreadPoolExecutor(1) as pool:
        a.handler.listen(None)
        waiting = pool.submit(a.handler.next_rendezvous)
        until(memory, lambda count: count == 1)
        a.backend.lags = True
        b.handler.join(NodeInfo("default", 1, "", 0))
        first = b.placed().placement
        b.handler.send(Fail(0, CAUSE, 3))
        assert b.round_ended() == 0
        a.backend.lags = False
        b.handler.join(NodeInfo("default", 1, "", 0))
        info = waiting.result(TIMEOUT)
        assert (info.rank, info.world_size) == (0, 2)
        assert info.bootstrap_store_info is not None
        assert info.bootstrap_store_info.master_port != first.store_port
        assert b.placed().placement.store_port == info.bootstrap_store_info.master_port
