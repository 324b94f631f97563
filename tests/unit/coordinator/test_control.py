"""The control server and its clients over real sockets: sessions, unauthenticated peers, and error messages."""

from __future__ import annotations

import logging
import queue
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from rallypoint.base.clock import Deadline
from rallypoint.base.endpoint import Endpoint, listening_socket
from rallypoint.base.loop import shared_loop
from rallypoint.control.client.dialing import DialTarget, FixedEndpoint
from rallypoint.control.client.tcp_link import TcpLink
from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.coordinator.server import ControlServer
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import Fail, NodeId, NodeInfo, Refusal, Settings
from rallypoint.control.protocol.codec import MAGIC
from rallypoint.control.protocol.messages import (
    ConfigDiffers,
    Fault,
    FaultRequested,
    JoinRefused,
    JoinRequest,
    LinkDown,
    LinkLost,
    Notification,
    OperatorAction,
    Placed,
    ResumeRequest,
    RoundEnded,
)
from rallypoint.failures.cause import Cause
from rallypoint.observe.watching.messages import FaultCommand
from rallypoint.observe.watching.session import JobWatch
from rallypoint.rendezvous.elastic import own_node
from tests.ports import free_port
from tests.unit.clocks import HandClock
from tests.unit.coordinator.sockets import TIMEOUT, Heard, serving
from tests.waiting import until

CAUSE = Cause(0, 0, "a", 42, -9, "Signal 9 (SIGKILL)", "", 0.0, "")


class Node:
    """A link and its notifications."""

    def __init__(self, endpoint: Endpoint, wait: float = 20.0) -> None:
        self.told = Heard()
        settings = Settings("job", 1, 2, join_timeout=wait)
        self.link = TcpLink(
            FixedEndpoint(DialTarget(endpoint)), settings, own_node(), self.told.take, Deadline.after(wait)
        )

    def join(self, port: int = 7000) -> None:
        self.link.send(JoinRequest(NodeInfo("default", 1, "", port), 600.0))

    def hears(self) -> Notification:
        notice = self.told.get(timeout=TIMEOUT)
        return self.hears() if isinstance(notice, ConfigDiffers) else notice

    def loses(self) -> str:
        notice = self.hears()
        assert isinstance(notice, LinkLost), notice
        return notice.detail


@contextmanager
def served(nodes: int) -> Iterator[tuple[Dispatcher, Endpoint]]:
    dispatcher = Dispatcher(Settings("job", nodes, nodes))
    with serving(dispatcher) as server:
        yield dispatcher, Endpoint("127.0.0.1", server.port)


def test_a_server_says_why_it_closes() -> None:
    server = ControlServer(Dispatcher(Settings("job", 1, 1)), listening_socket("127.0.0.1", 0))
    node = Node(Endpoint("127.0.0.1", server.port), wait=2.0)
    node.join()
    assert isinstance(node.hears(), Placed)
    server.close(why="n1, which hosted it, left the job")
    down = node.hears()
    assert isinstance(down, LinkDown)
    assert down.detail.endswith("was lost (n1, which hosted it, left the job)")
    node.link.send(Fail(0, CAUSE, 3))
    assert "was lost (n1, which hosted it, left the job) and did not come back within" in node.loses()
    node.link.close()


def test_sessions_end_with_one_reason() -> None:
    clock, why, told = HandClock(100.0), list[str](), list[Notification]()
    dispatcher = Dispatcher(Settings("job", 1, 2), clock)
    node = NodeId("h", 1, 0)
    first = dispatcher.attach(told.append, SessionRecord(node, "h"), disconnect=why.append)
    dispatcher.receive(first, JoinRequest(NodeInfo("default", 1, "", 7000), 600.0))
    second = dispatcher.attach(told.append, SessionRecord(node, "h"), disconnect=why.append)
    dispatcher.receive(second, ResumeRequest(dispatcher.incarnation, NodeInfo("default", 1, "", 7000)))
    assert why == ["its node opened another one"]
    clock.now += 100.0
    dispatcher.tick()  # after a sleep, the first tick only looks
    while len(why) < 2:
        clock.now = dispatcher.wake_at()
        dispatcher.tick()
    assert why[1:] == ["it was silent for 3 s"]


def test_a_cut_link_sends_and_receives_nothing_until_its_end() -> None:
    with served(nodes=1) as (dispatcher, endpoint):
        node = Node(endpoint)
        node.join()
        assert isinstance(node.hears(), Placed)
        watch, begun = JobWatch(dispatcher, lambda _told: None, lambda _why: None), time.monotonic()
        on_loop = shared_loop().call
        on_loop(lambda: watch.receive(FaultCommand("u@h", Fault.CUT, node="0", lasts=0.5)))
        assert [type(node.hears()) for _ in range(2)] == [OperatorAction, FaultRequested]
        node.link.send(Fail(0, CAUSE, 3))
        assert isinstance(node.hears(), RoundEnded), "in the same session"
        assert time.monotonic() >= begun + 0.5
        node.link.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid", "a..b"])
def test_dialing_ends_at_the_deadline(host: str) -> None:
    node = Node(Endpoint(host, free_port()), wait=0.3)  # for `a..b` the resolver's codec raises no OSError
    sentence = node.loses()
    assert sentence.startswith("no control plane could be reached at ")
    assert host in sentence
    assert host == "a..b" or "check --rdzv-endpoint" in sentence
    node.link.close()


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "torch": b"\x00\xce\xf7\x85\x3c\x0d\x16\x39\x00\x00",
    "zeros": bytes(100),
    "half a greeting": MAGIC[:3] + b"x",
    "a frame of 4 GiB": MAGIC + b"\xff\xff\xff\xff",
    "a frame of 2^60": MAGIC + (2**60).to_bytes(8, "big").lstrip(b"\0"),
    "no message": MAGIC + b"\x00\x00\x00\x02\x93\x01",
    "an unknown message": MAGIC + b"\x00\x00\x00\x03\x92\x63\xc0",
    "nested too deep": MAGIC + (5000).to_bytes(4, "big") + b"\x91" * 5000,
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_costs_a_log_line(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with served(nodes=1) as (_, endpoint), caplog.at_level(logging.WARNING, "rallypoint"):
        with socket.create_connection(("127.0.0.1", endpoint.port)) as peer:
            peer.settimeout(TIMEOUT)
            peer.sendall(data)
            with suppress(ConnectionResetError):  # it may disconnect with our bytes unread
                assert peer.recv(100) == b""
        node = Node(endpoint)
        node.join()
        assert isinstance(node.hears(), Placed)
        node.link.close()
    (refusal,) = [line for line in caplog.messages if "refused" in line]
    assert refusal.startswith("control connection from 127.0.0.1:")


def test_a_refused_node_does_not_notice_the_end_of_the_server() -> None:
    with served(nodes=3) as (dispatcher, endpoint):
        a, b = Node(endpoint), Node(endpoint)
        b.join(7002)
        until(lambda: dispatcher.state.participants)
        a.link.send(JoinRequest(NodeInfo("default", 1, "", 7001), 1.0))
        for node in (a, b):  # the second has 600 s yet
            refused = node.hears()
            assert isinstance(refused, JoinRefused)
            assert (refused.refusal, refused.progress and refused.progress.joined) == (Refusal.TIMEOUT, 2)
    with pytest.raises(queue.Empty):
        b.told.get(timeout=0.5)
    b.join(7003)
    assert isinstance(b.hears(), LinkDown), "now it does"
    a.link.close()
    b.link.close()


def test_a_join_has_one_deadline() -> None:
    with served(nodes=2) as (dispatcher, endpoint):
        node = Node(endpoint, wait=30.0)
        node.link.send(JoinRequest(NodeInfo("default", 1, "", 7001), 1.5))
        until(lambda: dispatcher.state.participants)
    assert isinstance(node.hears(), LinkDown)
    assert "did not come back within" in node.loses()
    node.link.close()
