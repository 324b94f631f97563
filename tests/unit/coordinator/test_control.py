"""The control server and its clients over real sockets: sessions, unauthenticated peers, and each failure's message."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from rallypoint.base.clock import Deadline
from rallypoint.base.endpoint import Endpoint, listening_socket
from rallypoint.control.client.dialing import DialTarget, FixedEndpoint
from rallypoint.control.client.tcp_link import TcpLink
from rallypoint.control.coordinator.dispatcher import Dispatcher, LocalLink
from rallypoint.control.coordinator.jobs import ManyJobs
from rallypoint.control.coordinator.server import ControlServer
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.operations import Close, Fail, Refusal, Succeed
from rallypoint.control.membership.state import NodeId, NodeInfo, Outcome, Settings, Verdict
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.frames import MAGIC, frame
from rallypoint.control.protocol.handshake import ClientHandshake, HandshakeError, Proof
from rallypoint.control.protocol.messages import (
    ConfigDiffers,
    JobEnded,
    JoinRefused,
    JoinRequest,
    LinkDown,
    LinkLost,
    LinkUp,
    Notification,
    Placed,
    Progress,
    ResumeRequest,
    RoundEnded,
    SessionEnded,
)
from rallypoint.control.protocol.messages import ProgressRequest as InquireRequest
from rallypoint.failures.cause import Cause, Ending
from tests.ports import free_port
from tests.unit.rendezvous.listening import Heard

TIMEOUT = 120.0
CAUSE = Cause(0, 0, "a", 42, -9, "Signal 9 (SIGKILL)", "", 0.0, "")


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


class Node:
    """One link and what it was told."""

    def __init__(self, endpoint: Endpoint, job: str = "job", key: bytes | None = None, wait: float = 20.0) -> None:
        self.told = Heard()
        settings = Settings(job, 1, 2, join_timeout=wait)
        self.link = TcpLink(FixedEndpoint(DialTarget(endpoint, key)), settings, 0, self.told.take, Deadline.after(wait))

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
def served(nodes: int = 2, key: bytes | None = None, lease: float = 3.0) -> Iterator[tuple[Dispatcher, Endpoint]]:
    dispatcher = Dispatcher(Settings("job", nodes, nodes, lease=lease))
    keys = None if key is None else lambda _job: (key,)
    server = ControlServer(dispatcher, listening_socket("127.0.0.1", 0), keys=keys)
    try:
        yield dispatcher, Endpoint("127.0.0.1", server.port)
    finally:
        server.close()
        assert not server.connections


@contextmanager
def foreign(answer: Callable[[socket.socket], None]) -> Iterator[Endpoint]:
    """A service that is not ours: whoever connects gets `answer`, once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                answer(peer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield Endpoint("127.0.0.1", listener.getsockname()[1])
        finally:
            thread.join(TIMEOUT)


def test_nodes_meet_are_told_of_the_loss_of_one_and_meet_again() -> None:
    with served(nodes=2) as (dispatcher, endpoint):
        a, b = Node(endpoint), Node(endpoint)
        a.join(7001)
        b.join(7002)
        places = [a.hears(), b.hears()]
        assert sorted(each.placement.group_rank for each in places if isinstance(each, Placed)) == [0, 1]
        b.link.close()
        ended = a.hears()
        assert isinstance(ended, RoundEnded)
        assert ended.end.round == 0
        a.join()
        c = Node(endpoint)
        c.join()
        assert isinstance(c.hears(), Placed)
        assert isinstance(a.hears(), Placed)
        assert dispatcher.state.ledger.departed == 1
        a.link.close()
        c.link.close()


@contextmanager
def raw_session(endpoint: Endpoint) -> Iterator[socket.socket]:
    """A node made of a bare socket, which has joined and then says nothing by itself."""
    with socket.create_connection((endpoint.host, endpoint.port), timeout=TIMEOUT) as raw:
        hello = ClientHandshake("job", None, b"n", Settings("job", 1, 1)).hello("127.0.0.1", 1, 0)
        raw.sendall(MAGIC + frame(codec.encode(hello)))
        assert raw.recv(1000)
        raw.sendall(frame(codec.encode(Proof(b""))))
        assert raw.recv(1000)
        raw.sendall(frame(codec.encode(JoinRequest(NodeInfo("default", 1, "", 7000), 600.0))))
        assert raw.recv(1000)
        yield raw


def test_a_session_that_breaks_off_is_a_loss_and_is_noticed_at_once() -> None:
    with served(nodes=1, lease=3600.0) as (dispatcher, endpoint):
        told = Heard()
        host = LocalLink(dispatcher, NodeId("127.0.0.1", 1, 99), told.put, "127.0.0.1")
        with raw_session(endpoint):
            host.send(JoinRequest(NodeInfo("default", 1, "", 7000), 600.0))
            host.send(InquireRequest())
            assert isinstance(told.get(timeout=TIMEOUT), Progress)
        placed = told.get(timeout=TIMEOUT)
        assert isinstance(placed, Placed)
        assert placed.placement.round == 1
        assert dispatcher.state.ledger.lost == 1
        host.close()


def test_a_silent_node_is_gone_after_its_lease_and_learns_of_it() -> None:
    with served(nodes=1, lease=2.0) as (dispatcher, endpoint), raw_session(endpoint) as mute:
        new_node = Node(endpoint)
        new_node.join()
        assert isinstance(new_node.hears(), Placed)
        assert dispatcher.state.ledger.lost == 1
        payload = mute.recv(1000)[4:]
        assert codec.decode_notification(payload) == SessionEnded("nothing was heard from it for 2 s")
        with suppress(ConnectionResetError):
            assert mute.recv(1000) == b"", "a node that was taken out must find its session closed"
        new_node.link.close()


def test_a_server_that_ends_says_why_before_it_hangs_up() -> None:
    server = ControlServer(Dispatcher(Settings("job", 1, 1)), listening_socket("127.0.0.1", 0))
    node = Node(Endpoint("127.0.0.1", server.port), wait=2.0)
    node.join()
    assert isinstance(node.hears(), Placed)
    server.close(why="n1, which hosted it, has left the job")
    down = node.hears()
    assert isinstance(down, LinkDown)
    assert down.detail.endswith("was lost (n1, which hosted it, has left the job)")
    node.link.send(Fail(0, CAUSE, 3))
    assert "was lost (n1, which hosted it, has left the job) and has not come back within" in node.loses()
    node.link.close()


def test_why_a_session_was_ended_is_the_one_reason_that_there_was() -> None:
    clock, why, told = Clock(), list[str](), list[Notification]()
    dispatcher = Dispatcher(Settings("job", 1, 2), clock)
    node = NodeId("h", 1, 0)
    first, name = dispatcher.attach(told.append, SessionRecord(node, "h"), disconnect=why.append)
    dispatcher.receive(first, JoinRequest(NodeInfo("default", 1, "", 7000), 600.0))
    second, _ = dispatcher.attach(told.append, SessionRecord(node, "h"), disconnect=why.append)
    dispatcher.receive(second, ResumeRequest(dispatcher.incarnation, name, NodeInfo("default", 1, "", 7000)))
    assert why == ["its node has opened another"]
    clock.now += 100.0
    dispatcher.tick()  # after a sleep it looks again first
    while len(why) < 2:
        clock.now = dispatcher.wake_at()
        dispatcher.tick()
    assert why[1:] == ["nothing was heard from it for 3 s"]


def test_a_link_waits_for_a_server_that_comes_late() -> None:
    port = free_port()
    node = Node(Endpoint("127.0.0.1", port))
    node.join()
    dispatcher = Dispatcher(Settings("job", 1, 1))
    server = ControlServer(dispatcher, listening_socket("127.0.0.1", port))
    assert isinstance(node.hears(), Placed)
    node.link.close()
    server.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_a_server_that_never_comes_is_given_up_at_the_deadline(host: str) -> None:
    node = Node(Endpoint(host, free_port()), wait=0.3)
    sentence = node.loses()
    assert sentence.startswith("no control plane could be reached at ")
    assert host in sentence
    assert "check --rdzv-endpoint" in sentence
    node.link.close()


def test_a_foreign_service_is_named_by_what_it_says() -> None:
    with foreign(lambda peer: peer.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")) as endpoint:
        node = Node(endpoint)
        assert "is not Rallypoint's control plane: it starts with b'SSH-2.0-" in node.loses()
        node.link.close()


def test_another_job_is_refused_and_the_server_serves_on(caplog: pytest.LogCaptureFixture) -> None:
    with served(nodes=1) as (_, endpoint):
        peer = Node(endpoint, job="other")
        assert "belongs to job 'job', not to 'other'" in peer.loses()
        peer.link.close()
        node = Node(endpoint)
        node.join()
        assert isinstance(node.hears(), Placed)
        node.link.close()


def test_secrets() -> None:
    with served(nodes=1, key=b"right") as (_, endpoint):
        for wrong, why in ((b"wrong", "is not the job's"), (None, "this job has a secret")):
            peer = Node(endpoint, key=wrong)
            assert why in peer.loses()
            peer.link.close()
        node = Node(endpoint, key=b"right")
        node.join()
        assert isinstance(node.hears(), Placed)
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
def test_the_bytes_of_an_unauthenticated_peer_cost_a_log_line(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
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
    refusals = [line for line in caplog.messages if "refused" in line]
    assert len(refusals) == 1, caplog.messages


def test_a_truncated_greeting_costs_nothing() -> None:
    with served(nodes=1) as (_, endpoint):
        with socket.create_connection(("127.0.0.1", endpoint.port)) as peer:
            peer.sendall(MAGIC[:4])
        node = Node(endpoint)
        node.join()
        assert isinstance(node.hears(), Placed)
        node.link.close()


def test_an_error_that_nobody_foresaw_is_told_too() -> None:
    node = Node(Endpoint("a..b", 1), wait=2.0)  # the resolver's codec raises what is no OSError
    assert "no control plane could be reached at a..b:1" in node.loses()
    node.link.close()


def test_a_server_that_comes_back_is_filled_and_nobody_hears_of_it() -> None:
    port = free_port()
    first = ControlServer(Dispatcher(Settings("job", 2, 2)), listening_socket("127.0.0.1", port))
    a, b = Node(Endpoint("127.0.0.1", port)), Node(Endpoint("127.0.0.1", port))
    a.join(7001)
    b.join(7002)
    for node in (a, b):
        assert isinstance(node.hears(), Placed)
    first.close(linger=0.0)
    for node in (a, b):
        assert isinstance(node.hears(), LinkDown)
    dispatcher = Dispatcher(Settings("job", 2, 2))
    second = ControlServer(dispatcher, listening_socket("127.0.0.1", port))
    for node in (a, b):
        assert isinstance(node.hears(), LinkUp)
    a.link.send(Fail(0, CAUSE, 3))
    for node in (a, b):
        ended = node.hears()
        assert isinstance(ended, RoundEnded)
        assert ended.end.cause == CAUSE
        node.join()
    for node in (a, b):
        placed = node.hears()
        assert isinstance(placed, Placed)
        assert (placed.placement.round, placed.placement.restarts) == (1, 1)
        node.link.close()
    assert dispatcher.state.ledger.lost == 0
    second.close()


def test_what_was_asked_in_vain_is_asked_again() -> None:
    port = free_port()
    first = ControlServer(Dispatcher(Settings("job", 1, 1)), listening_socket("127.0.0.1", port))
    node = Node(Endpoint("127.0.0.1", port))
    node.join()
    assert isinstance(node.hears(), Placed)
    first.close(linger=0.0)
    assert isinstance(node.hears(), LinkDown)
    node.link.send(Succeed(0))
    second = ControlServer(Dispatcher(Settings("job", 1, 1)), listening_socket("127.0.0.1", port))
    assert isinstance(node.hears(), LinkUp)
    assert node.hears() == JobEnded(Verdict(Outcome.SUCCEEDED))
    node.link.close()
    second.close()


def test_who_needs_the_control_plane_gives_up_when_it_stays_away_for_the_join_timeout() -> None:
    with served(nodes=1) as (_, endpoint):
        node = Node(endpoint, wait=2.0)
        node.join()
        assert isinstance(node.hears(), Placed)
    assert isinstance(node.hears(), LinkDown)
    with pytest.raises(queue.Empty):  # it needs nothing: no timeout runs out
        node.told.get(timeout=2.5)
    node.link.send(Fail(0, CAUSE, 3))
    assert "was lost (it closed the connection) and has not come back within" in node.loses()
    node.link.close()


def until_one_has_joined(dispatcher: Dispatcher) -> None:
    timeout = time.monotonic() + TIMEOUT
    while not dispatcher.state.participants:
        assert time.monotonic() < timeout
        threading.Event().wait(0.01)


def test_who_was_refused_does_not_miss_the_server_that_goes() -> None:
    with served(nodes=3) as (dispatcher, endpoint):
        a, b = Node(endpoint), Node(endpoint)
        b.join(7002)
        until_one_has_joined(dispatcher)
        a.link.send(JoinRequest(NodeInfo("default", 1, "", 7001), 1.0))
        for node in (a, b):  # the second has 600 s yet
            refused = node.hears()
            assert isinstance(refused, JoinRefused)
            assert refused.refusal is Refusal.TIMEOUT
            assert refused.progress is not None
            assert refused.progress.joined == 2
    with pytest.raises(queue.Empty):
        b.told.get(timeout=0.5)
    b.join(7003)  # now it is missed
    assert isinstance(b.hears(), LinkDown)
    a.link.close()
    b.link.close()


def test_a_join_has_one_deadline_whoever_decides_on_it() -> None:
    with served(nodes=2) as (dispatcher, endpoint):
        node = Node(endpoint, wait=30.0)
        node.link.send(JoinRequest(NodeInfo("default", 1, "", 7001), 1.5))
        until_one_has_joined(dispatcher)
    assert isinstance(node.hears(), LinkDown)
    assert "has not come back within" in node.loses()
    node.link.close()


def test_one_server_for_many_jobs() -> None:
    jobs = ManyJobs()
    server = ControlServer(jobs, listening_socket("127.0.0.1", 0))
    endpoint = Endpoint("127.0.0.1", server.port)
    nodes = [Node(endpoint, job=job) for job in ("one", "two")]
    for node in nodes:
        node.join()
        node.join()
    for node in nodes:
        node.link.send(Close())
        assert node.hears() == JobEnded(Verdict(Outcome.STOPPED, ending=Ending.STOPPED))
        node.link.close()
    server.close()


def test_a_job_without_nodes_is_forgotten_after_a_while() -> None:
    clock = Clock()
    jobs = ManyJobs(clock)
    hello = ClientHandshake("one", None, b"n", Settings("one", 1, 1)).hello("h", 1, 0)
    dispatcher = jobs.dispatcher_for(hello, "192.0.2.1")
    session, _ = dispatcher.attach(lambda _notice: None, SessionRecord(NodeId("h", 1, 0), "h"))
    clock.now += 1000
    jobs.wake_at()
    assert jobs.dispatcher_for(hello, "192.0.2.1") is dispatcher
    dispatcher.detach(session)
    clock.now = jobs.wake_at()
    assert jobs.dispatcher_for(hello, "192.0.2.1") is not dispatcher
    with pytest.raises(HandshakeError, match="asks for 2 to 1 nodes"):
        jobs.dispatcher_for(hello._replace(settings=Settings("one", 2, 1)), "192.0.2.1")
