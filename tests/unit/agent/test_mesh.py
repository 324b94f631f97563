"""The mesh of several agents in one process: it runs once, gives all nodes the same result, and leaves no listener."""

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
from rallypoint.features.round_setup import PeerExchange, PeerRecord, RoundInSetup, RoundSetup, encode_record
from rallypoint.store.client import TCPStore
from rallypoint.store.server import StoreServer
from tests.ports import free_port
from tests.unit.agent.test_peer_exchange import User
from tests.unit.agent.test_stopping import TIMEOUT
from tests.unit.clocks import ShiftedClock
from tests.unit.compat.test_subclass import ours, spec

pytestmark = pytest.mark.process


class Deaf(MeshDialer):
    """Announces a port on which nobody listens."""

    def listen(self, round_: RoundInSetup) -> MeshListener:
        made = super().listen(round_)
        made.port = free_port()
        return made


class Node:
    """The exchange of one agent, and its mesh."""

    def __init__(
        self, rank: int, nodes: int, store: int, mode: str, dialer: MeshDialer | None = None, timeout: float = TIMEOUT
    ) -> None:
        self.group = WorkerGroup(spec(ours(), workers=1))
        self.clock = ShiftedClock()
        self.dialer = dialer or MeshDialer(mode)
        self.exchange = PeerExchange([self.dialer], timeout)
        self.setup = RoundSetup([self.exchange, self.dialer], self.clock)
        self.close = self.setup.close
        self._place = (rank, nodes, store)

    def enter(self, round_: int = 0) -> None:
        rank, nodes, store = self._place
        ranks = NodeRanks(rank, nodes, rank, nodes)
        self.group.placement = Placement(round_, rank, nodes, ranks, "127.0.0.1", store, round_)
        self.setup.begin(self.group)

    @property
    def waits_for_verdict(self) -> bool:
        present = self.setup._round
        return present is not None and present.seconds == mesh._VERDICT

    def addresses(self) -> list[str]:
        """Addresses of the sockets on which it listens."""
        listener = None if self.setup._round is None else self.dialer._listeners.get(self.setup._round)
        return [] if listener is None else [str(listener._sock.getsockname()[0])]


def drive(nodes: Sequence[Node], *, to_verdict: bool = False) -> None:
    """Run the loops of all nodes until none has work left, except for waits for a verdict."""
    give_up = time.monotonic() + TIMEOUT
    while any(node.setup.preparing() and (to_verdict or not node.waits_for_verdict) for node in nodes):
        assert time.monotonic() < give_up, "the mesh hangs"
        until_readable([fd for node in nodes for fd in node.setup.fds()], 0.1)
        for node in nodes:
            node.setup.step()


@contextmanager
def round_of(
    count: int, mode: str, *deaf: int, change: Callable[[list[Node]], object] = lambda nodes: None
) -> Iterator[list[Node]]:
    """Nodes that have entered a round, of which the deaf ones cannot be reached; `change` is called before."""
    with StoreServer("127.0.0.1") as store:
        with ExitStack() as stack:
            nodes = [Node(rank, count, store.port, mode, Deaf(mode) if rank in deaf else None) for rank in range(count)]
            for node in nodes:
                stack.enter_context(closing(node))
            change(nodes)
            for node in nodes:
                node.enter()
            yield nodes
        for thread in threading.enumerate():
            if thread.name in ("rallypoint-mesh", "rallypoint-setup"):
                thread.join(TIMEOUT)
                assert not thread.is_alive()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("count", [1, 2, 5, 70])
def test_all_nodes_reach_each_other_once(count: int, caplog: pytest.LogCaptureFixture) -> None:
    with round_of(count, REQUIRE) as nodes:
        assert {address for node in nodes for address in node.addresses()} <= {"127.0.0.1"}
        drive(nodes)
        assert not any(node.setup.failure or node.addresses() for node in nodes)
        assert all(node.setup.wake_at() == math.inf for node in nodes)
        before = threading.active_count()
        for node in nodes:
            node.enter(1)
            assert not node.setup.preparing()
        assert threading.active_count() == before
    assert warnings(caplog) == []


def test_one_node_ends_the_job_and_the_others_wait_for_the_verdict(caplog: pytest.LogCaptureFixture) -> None:
    with round_of(3, REQUIRE, 2) as nodes:
        drive(nodes)
        first, *others = nodes
        assert "cannot reach" in first.setup.failure
        assert first.setup.ends_job
        assert first.setup.failed_node == f"{socket.gethostname()} (group rank 0)"
        for node in others:
            assert node.waits_for_verdict
            assert not node.setup.failure
            node.setup.cancel()  # the verdict has come
            assert not node.setup.preparing()
    assert len(warnings(caplog)) == 2, "the failure of the first node says it"


def test_without_a_verdict_each_node_has_the_same_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "_VERDICT", 0.05)
    with round_of(2, REQUIRE, 1) as nodes:
        drive(nodes, to_verdict=True)
        assert len({node.setup.failure for node in nodes}) == 1
        assert all(node.setup.ends_job for node in nodes)


def test_nodes_dial_only_in_their_first_round() -> None:
    with round_of(2, REQUIRE) as nodes:
        nodes[0].setup.cancel()
        assert not nodes[0].addresses()
        for node in nodes:
            node.enter(1)
            assert not node.setup.preparing()
            assert not node.setup.failure
    with closing(Node(2, 3, 1, REQUIRE)) as node:
        node.enter(4)
        assert not node.setup.preparing(), "a new node dials nobody"


def test_other_users_get_the_records_in_each_round() -> None:
    users = [User(0, 1), User(0, 1)]

    def add(nodes: list[Node]) -> None:
        for node, user in zip(nodes, users, strict=True):
            node.exchange.users.append(user)

    with round_of(2, REQUIRE, change=add) as nodes:
        drive(nodes)
        assert all(set(user.taken) == {0, 1} for user in users)
        for node, user in zip(nodes, users, strict=True):
            user.taken = {}
            node.enter(1)
            assert not node.addresses()
        drive(nodes)
        assert all(set(user.taken) == {0, 1} for user in users)


def test_a_node_without_the_flag_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def replace(nodes: list[Node]) -> None:
        nodes[1].exchange.users[:] = [User()]
        nodes[1].setup.steps.remove(nodes[1].dialer)

    with round_of(2, WARN, change=replace) as nodes:
        drive(nodes)
    (line,) = warnings(caplog)
    node = f"{socket.gethostname()} (group rank 1)"
    assert line.startswith(f"{node} was started without --preflight; use the same value on all nodes")


@pytest.mark.parametrize("others", [False, True], ids=["mesh", "mesh and others"])
@pytest.mark.parametrize("mode", [WARN, REQUIRE])
def test_a_store_that_cannot_be_reached(mode: str, others: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It fails the node if the mesh is required or others need the store, and ends the job only in the first case."""
    where = f"{socket.gethostname()} cannot learn about the other nodes of round 0 from the worker store at 127.0.0.1:"
    with closing(Node(1, 2, free_port(), mode, timeout=0.2)) as node:
        node.exchange.users += [User(0)] * others
        node.enter()
        drive([node])
        fails = others or mode == REQUIRE
        assert node.setup.failure.startswith(where) == fails
        assert node.setup.ends_job == (mode == REQUIRE)
    if not fails:
        (line,) = warnings(caplog)
        assert line.startswith(f"this node will not test its connections to the others: {where}")
    elif not others:
        assert warnings(caplog) == []


@pytest.mark.parametrize("mode", [WARN, REQUIRE])
def test_results_that_do_not_arrive_in_time(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    with round_of(2, mode) as nodes, TCPStore("127.0.0.1", nodes[0]._place[2]) as store:
        node = nodes[1]
        nodes[0].setup.cancel()  # so it sends no result
        record = PeerRecord(0, "n0", "127.0.0.1", 0, 1, {"mesh": (free_port(),)})
        store.set("rallypoint/peers/0/0", encode_record(record))
        store.wait(["rallypoint/peers/0/mesh/1"], TIMEOUT)
        node.clock.ahead = 1000.0
        node.setup.step()
        assert not node.setup.preparing()
        why = f"{socket.gethostname()} cannot exchange its results over the worker store at 127.0.0.1:"
        assert node.setup.failure.startswith(why) == (mode == REQUIRE)
    lines = warnings(caplog)
    assert len(lines) == (mode == WARN)
    assert all(line.startswith(f"it is unknown whether the nodes can reach each other: {why}") for line in lines)
