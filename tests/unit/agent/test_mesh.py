"""The mesh of several agents in one process: it runs once, gives all the same result, and leaves no listener."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

import pytest

from rallypoint.agent.spec import WorkerGroup
from rallypoint.base.kernel import until_readable
from rallypoint.clusters.preflight.dialing import MeshListener
from rallypoint.clusters.preflight.results import REQUIRE, WARN
from rallypoint.control.membership.state import NodeRanks
from rallypoint.control.protocol.messages import Placement
from rallypoint.features.preflight import mesh
from rallypoint.features.preflight.mesh import MeshDialer
from rallypoint.features.round_setup import (
    PeerExchange,
    PeerRecord,
    RoundInSetup,
    RoundSetup,
    encode_record,
)
from rallypoint.store.client import TCPStore
from rallypoint.store.server import StoreServer
from tests.ports import free_port
from tests.unit.agent.test_peer_exchange import User
from tests.unit.agent.test_stopping import TIMEOUT
from tests.unit.clocks import ShiftedClock
from tests.unit.compat.test_subclass import ours, spec

pytestmark = pytest.mark.process


class Deaf(MeshDialer):
    """Tells the others of a port at which nobody listens."""

    def listen(self, round_: RoundInSetup) -> MeshListener:
        made = super().listen(round_)
        made.port = free_port()
        return made


class Node:
    """The exchange of one agent, and its mesh."""

    def __init__(
        self,
        rank: int,
        nodes: int,
        store: int,
        mode: str,
        kind: type[MeshDialer] = MeshDialer,
        timeout: float = TIMEOUT,
    ) -> None:
        self.group = WorkerGroup(spec(ours(), workers=1))
        self.clock = ShiftedClock()
        self.dialer = kind(mode)
        self.exchange = PeerExchange([self.dialer], timeout)
        self.setup = RoundSetup([self.exchange, self.dialer], self.clock)
        self._place = (rank, nodes, store)

    def enters(self, round_: int = 0) -> None:
        rank, nodes, store = self._place
        ranks = NodeRanks(rank, nodes, rank, nodes)
        self.group.placement = Placement(round_, rank, nodes, ranks, "127.0.0.1", store, round_)
        self.setup.begin(self.group)

    @property
    def waits_for_verdict(self) -> bool:
        present = self.setup._round
        return present is not None and present.seconds == mesh._VERDICT

    def listens_at(self) -> list[str]:
        """Addresses of the sockets on which it listens."""
        listener = None if self.setup._round is None else self.dialer._listeners.get(self.setup._round)
        return [] if listener is None else [str(listener._sock.getsockname()[0])]

    def close(self) -> None:
        self.setup.close()


def drive(nodes: Sequence[Node]) -> None:
    """Do what is due, until no node has anything to do by itself."""
    give_up = time.monotonic() + TIMEOUT
    while any(each.setup.preparing() and not each.waits_for_verdict for each in nodes):
        assert time.monotonic() < give_up, "the mesh hangs"
        until_readable([fd for each in nodes for fd in each.setup.fds()], 0.1)
        for each in nodes:
            each.setup.step()


@contextmanager
def round_of(
    nodes: int, mode: str, *deaf: int, change: Callable[[list[Node]], object] = lambda made: None
) -> Iterator[list[Node]]:
    """Nodes that have entered a round, some of which cannot be reached; `change` is called before."""
    with StoreServer("127.0.0.1") as store:
        with ExitStack() as stack:
            made = [
                stack.enter_context(closing(Node(rank, nodes, store.port, mode, Deaf if rank in deaf else MeshDialer)))
                for rank in range(nodes)
            ]
            change(made)
            for each in made:
                each.enters()
            yield made
        for thread in threading.enumerate():
            if thread.name in ("rallypoint-mesh", "rallypoint-setup"):
                thread.join(TIMEOUT)
                assert not thread.is_alive()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]


@pytest.mark.parametrize("nodes", [1, 2, 5, 70])
def test_all_reach_each_other_and_the_next_round_does_nothing(nodes: int, caplog: pytest.LogCaptureFixture) -> None:
    with round_of(nodes, REQUIRE) as made:
        assert {address for each in made for address in each.listens_at()} <= {"127.0.0.1"}
        drive(made)
        assert not any(each.setup.failure or each.listens_at() for each in made)
        assert all(each.setup.wake_at() == math.inf for each in made)
        before = threading.active_count()
        for each in made:
            each.enters(1)
            assert not each.setup.preparing()
        assert threading.active_count() == before
    assert told(caplog) == []


def test_where_it_is_required_one_node_ends_the_job_and_the_others_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with round_of(3, REQUIRE, 2) as made:
        drive(made)
        first, *others = made
        assert "cannot reach" in first.setup.failure
        assert first.setup.ends_job
        assert first.setup.failed_node == f"{socket.gethostname()} (group rank 0)"
        for each in others:
            assert each.waits_for_verdict
            assert not each.setup.failure
            each.setup.cancel()  # the verdict has come
            assert not each.setup.preparing()
    assert len(told(caplog)) == 2, "the first says it by its failure"


def test_where_no_verdict_comes_each_node_has_the_same_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "_VERDICT", 0.05)
    with round_of(2, REQUIRE, 1) as made:
        while any(each.setup.preparing() for each in made):
            until_readable([fd for each in made for fd in each.setup.fds()], TIMEOUT)
            for each in made:
                each.setup.step()
        assert len({each.setup.failure for each in made}) == 1
        assert all(each.setup.ends_job for each in made)


def test_a_round_that_ends_meanwhile_is_forgotten_and_the_next_one_does_nothing() -> None:
    with round_of(2, REQUIRE) as made:
        made[0].setup.cancel()
        assert not made[0].listens_at()
        for each in made:
            each.enters(1)
            assert not each.setup.preparing()
            assert not each.setup.failure


def test_a_node_that_comes_later_dials_nobody() -> None:
    with closing(Node(2, 3, 1, REQUIRE)) as node:
        node.enters(4)
        assert not node.setup.preparing()


def test_who_else_needs_the_records_gets_them_in_each_round() -> None:
    users = [User(0, 1), User(0, 1)]

    def add(made: list[Node]) -> None:
        for each, user in zip(made, users, strict=True):
            each.exchange.users.append(user)

    with round_of(2, REQUIRE, change=add) as made:
        drive(made)
        assert all(set(user.taken) == {0, 1} for user in users)
        for each, user in zip(made, users, strict=True):
            user.taken = {}
            each.enters(1)
            assert not each.listens_at()
        drive(made)
        assert all(set(user.taken) == {0, 1} for user in users)


def test_a_node_that_was_started_without_it_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def replace(made: list[Node]) -> None:
        made[1].exchange.users[:] = [User()]
        made[1].setup.steps.remove(made[1].dialer)

    with round_of(2, WARN, change=replace) as made:
        drive(made)
    (line,) = told(caplog)
    assert line.startswith(
        f"{socket.gethostname()} (group rank 1) was started without --preflight; use the same value on all nodes"
    )


def test_a_store_that_is_not_reached_is_a_warning_or_what_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    where = f"{socket.gethostname()} cannot learn about the other nodes of round 0 from the worker store at 127.0.0.1:"
    for mode in (WARN, REQUIRE):
        with closing(Node(1, 2, free_port(), mode, timeout=0.2)) as node:
            node.enters()
            drive([node])
            assert node.setup.failure.startswith(where) == (mode == REQUIRE)
    (line,) = told(caplog)
    assert line.startswith(f"this node will not test its connections to the others: {where}")


@pytest.mark.parametrize("mode", [WARN, REQUIRE])
def test_it_ends_the_job_only_where_the_mesh_is_required(mode: str) -> None:
    with closing(Node(1, 2, free_port(), mode, timeout=0.2)) as node:
        node.exchange.users.append(User(0))
        node.enters()
        drive([node])
        assert "cannot learn about the other nodes" in node.setup.failure
        assert node.setup.ends_job == (mode == REQUIRE)


@pytest.mark.parametrize("mode", [WARN, REQUIRE])
def test_what_is_not_known_in_time_is_a_warning_or_what_has_failed(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    with round_of(2, mode) as made, TCPStore("127.0.0.1", made[0]._place[2]) as store:
        node = made[1]
        made[0].setup.cancel()  # whose finding never comes
        record = PeerRecord(0, "n0", "127.0.0.1", 0, 1, {"mesh": (free_port(),)})
        store.set("rallypoint/peers/0/0", encode_record(record))
        store.wait(["rallypoint/peers/0/mesh/1"], TIMEOUT)
        node.clock.ahead = 1000.0
        node.setup.step()
        assert not node.setup.preparing()
        why = f"{socket.gethostname()} cannot exchange its results over the worker store at 127.0.0.1:"
        assert node.setup.failure.startswith(why) == (mode == REQUIRE)
    assert len(told(caplog)) == (mode == WARN)
    assert all(line.startswith(f"it is unknown whether the nodes can reach each other: {why}") for line in told(caplog))
