"""The mesh of several agents in one process: it is done once, tells all the same, and leaves nobody listening."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

import pytest

from rallypoint.agent.features.mesh import Mesh
from rallypoint.agent.features.peers import PeerExchange
from rallypoint.agent.spec import WorkerGroup
from rallypoint.base.poll import until_readable
from rallypoint.clusters.preflight.results import REQUIRE, WARN
from rallypoint.control.membership.state import NodeRanks
from rallypoint.control.protocol.messages import Placement
from rallypoint.store.server import StoreServer
from tests.ports import free_port
from tests.unit.agent.test_peer_exchange import User
from tests.unit.agent.test_stopping import TIMEOUT
from tests.unit.clocks import ShiftedClock
from tests.unit.compat.test_subclass import ours, spec

pytestmark = pytest.mark.process


class Deaf(Mesh):
    """Tells the others of a port at which nobody listens."""

    def reserve(self, group: WorkerGroup) -> Sequence[int]:
        super().reserve(group)
        return [free_port()]


class Node:
    """The exchange and the mesh of one agent."""

    def __init__(
        self, rank: int, nodes: int, store: int, mode: str, kind: type[Mesh] = Mesh, timeout: float = TIMEOUT
    ) -> None:
        self.group = WorkerGroup(spec(ours(), workers=1))
        self.clock = ShiftedClock()
        self.exchange = PeerExchange(timeout=timeout)
        self.mesh = kind(mode, self.exchange.users, self.clock)
        self._place = (rank, nodes, store)

    def enters(self, round_: int = 0) -> None:
        rank, nodes, store = self._place
        ranks = NodeRanks(rank, nodes, rank, nodes)
        self.group.placement = Placement(round_, rank, nodes, ranks, "127.0.0.1", store, round_)
        self.mesh.begin(self.group)
        self.exchange.begin(self.group)

    @property
    def preparing(self) -> bool:
        return self.exchange.preparing() or self.mesh.preparing()

    @property
    def waits_for_verdict(self) -> bool:
        return not self.exchange.users and self.mesh.preparing()

    def listens_at(self) -> list[str]:
        """Addresses of the sockets on which it listens."""
        listener = self.mesh._listener
        return [] if listener is None else [str(listener._sock.getsockname()[0])]

    def close(self) -> None:
        self.exchange.close()
        self.mesh.close()


def drive(nodes: Sequence[Node]) -> None:
    """Do what is due, until no node has anything to do by itself."""
    give_up = time.monotonic() + TIMEOUT
    while any(each.preparing and not each.waits_for_verdict for each in nodes):
        assert time.monotonic() < give_up, "the mesh hangs"
        parts = [part for each in nodes for part in (each.exchange, each.mesh)]
        until_readable([fd for part in parts for fd in part.fds()], 1.0)
        for part in parts:
            part.step()


@contextmanager
def round_of(
    nodes: int, mode: str, *deaf: int, change: Callable[[list[Node]], object] = lambda made: None
) -> Iterator[list[Node]]:
    """Nodes that have entered a round, some of which cannot be reached; `change` is called before."""
    with StoreServer("127.0.0.1") as store:
        with ExitStack() as stack:
            made = [
                stack.enter_context(closing(Node(rank, nodes, store.port, mode, Deaf if rank in deaf else Mesh)))
                for rank in range(nodes)
            ]
            change(made)
            for each in made:
                each.enters()
            yield made
        for thread in threading.enumerate():
            if thread.name in ("rallypoint-mesh", "rallypoint-peers"):
                thread.join(TIMEOUT)
                assert not thread.is_alive()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]


@pytest.mark.parametrize("nodes", [1, 2, 5, 70])
def test_all_reach_each_other_and_the_next_round_does_nothing(nodes: int, caplog: pytest.LogCaptureFixture) -> None:
    with round_of(nodes, REQUIRE) as made:
        assert {address for each in made for address in each.listens_at()} <= {"127.0.0.1"}
        drive(made)
        assert not any(each.mesh.failure or each.exchange.failure for each in made)
        assert all(each.mesh.wake_at() == math.inf and len(each.mesh.fds()) == 1 for each in made), "nobody listens"
        before = threading.active_count()
        for each in made:
            each.enters(1)
            assert not each.preparing
        assert threading.active_count() == before
    assert told(caplog) == []


def test_where_it_is_required_one_node_ends_the_job_and_the_others_wait(caplog: pytest.LogCaptureFixture) -> None:
    with round_of(3, REQUIRE, 2) as made:
        drive(made)
        first, *others = made
        assert "cannot reach" in first.mesh.failure
        assert first.mesh.ends_job
        assert first.mesh.failed_node == f"{socket.gethostname()} (group rank 0)"
        assert not first.preparing
        for each in others:
            assert each.waits_for_verdict
            assert not each.mesh.failure
        waits, has_none = others
        waits.mesh.cancel()  # the verdict has come
        assert not waits.preparing
        has_none.clock.ahead = has_none.mesh.wake_at()
        has_none.mesh.step()
        assert has_none.mesh.failure == first.mesh.failure
    assert len(told(caplog)) == 2, "the first says it by its failure"


def test_a_round_that_ends_meanwhile_is_forgotten_and_the_next_one_does_nothing() -> None:
    with round_of(2, REQUIRE) as made:
        made[0].exchange.cancel()
        made[0].mesh.cancel()
        assert len(made[0].mesh.fds()) == 1, "nobody listens"
        for each in made:
            each.enters(1)
            assert not each.preparing
            assert not each.mesh.failure


def test_a_node_that_comes_later_dials_nobody() -> None:
    with closing(Node(2, 3, 1, REQUIRE)) as node:
        node.enters(4)
        assert not node.preparing
        assert not node.exchange.users


def test_who_else_needs_the_records_gets_them_in_each_round() -> None:
    users = [User(0, 1), User(0, 1)]

    def add(made: list[Node]) -> None:
        for each, user in zip(made, users, strict=True):
            each.exchange.users.append(user)

    with round_of(2, REQUIRE, change=add) as made:
        drive(made)
        assert [each.exchange.users for each in made] == [[user] for user in users]
        assert all(set(user.taken) == {0, 1} for user in users)
        for each, user in zip(made, users, strict=True):
            user.taken = {}
            each.enters(1)
            assert not each.mesh.preparing()
        drive(made)
        assert all(set(user.taken) == {0, 1} for user in users)


def test_a_node_that_was_started_without_it_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def replace(made: list[Node]) -> None:
        made[1].exchange.users.append(User())
        made[1].mesh = Mesh(WARN, [])  # of another exchange

    with round_of(2, WARN, change=replace) as made:
        drive(made)
    (line,) = told(caplog)
    assert line.startswith(f"{socket.gethostname()} (group rank 1) was started without --preflight; give all nodes")


def test_a_store_that_is_not_reached_is_a_warning_or_what_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    where = f"{socket.gethostname()} cannot learn of the other nodes of round 0 over the worker store at 127.0.0.1:"
    for mode in (WARN, REQUIRE):
        with closing(Node(1, 2, free_port(), mode, timeout=0.2)) as node:
            node.enters()
            drive([node])
            assert not node.exchange.failure
            assert node.mesh.failure.startswith(where) == (mode == REQUIRE)
            assert not node.exchange.users
    (line,) = told(caplog)
    assert line.startswith(f"this node does not dial the others: {where}")


@pytest.mark.parametrize("mode", [WARN, REQUIRE])
def test_what_is_not_known_in_time_is_a_warning_or_what_has_failed(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    with round_of(2, mode) as made:
        node = made[1]
        while not node.mesh.preparing():  # nobody answers for the other one, which is never stepped again
            until_readable([fd for each in made for fd in each.exchange.fds()], TIMEOUT)
            for each in made:
                each.exchange.step()
        node.clock.ahead = 1000.0
        assert node.mesh.wake_at() <= node.clock.monotonic()
        node.mesh.step()
        assert not node.mesh.preparing()
        why = f"{socket.gethostname()} cannot exchange what it has found over the worker store at 127.0.0.1:"
        assert node.mesh.failure.startswith(why) == (mode == REQUIRE)
    assert len(told(caplog)) == (mode == WARN)
    assert all(line.startswith(f"it is not known whether the nodes reach each other: {why}") for line in told(caplog))
