"""The states of a link (the table in `tcp_link`): how sessions end, and what ends the link."""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TypeVar

import msgspec
import pytest

from rallypoint.base.clock import Deadline
from rallypoint.base.endpoint import Endpoint
from rallypoint.control.client.dialing import DialTarget, FixedEndpoint
from rallypoint.control.client.tcp_link import LinkState, TcpLink
from rallypoint.control.membership.state import Fail, NodeId, NodeInfo, Outcome, Refusal, Settings, Verdict
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.codec import MAGIC, frame
from rallypoint.control.protocol.handshake import HandshakeError, Hello, Welcome
from rallypoint.control.protocol.messages import (
    Fault,
    FaultRequested,
    Heartbeat,
    JobEnded,
    JoinRefused,
    JoinRequest,
    LeaveRequest,
    LinkDown,
    LinkLost,
    LinkOpened,
    LinkUp,
    NextStore,
    NodeReport,
    NodesWaiting,
    Notification,
    SessionEnded,
)
from rallypoint.failures.cause import Cause
from tests.unit.coordinator.sockets import SocketNode
from tests.waiting import until

N = TypeVar("N", bound=Notification)
TIMEOUT = 60.0
JOB = Settings("job", 1, 1, join_timeout=TIMEOUT)
CAUSE = Cause(0, 0, "a", 42, -9, "Signal 9 (SIGKILL)", "", 0.0, "")
JOIN = JoinRequest(NodeInfo("default", 1, "", 7000), TIMEOUT)


class Moving(FixedEndpoint):
    """An endpoint that moves or cannot be resolved any more."""

    error: HandshakeError | None = None

    def resolve(self) -> DialTarget | None:
        if self.error is not None:
            raise self.error
        return self.target


def kinds(notifications: list[Notification]) -> list[type]:
    return [type(notification) for notification in notifications]


class Meeting:
    """A link, and the port that it dials, on which the test answers."""

    def __init__(self, deliver: Callable[[Notification], None] | None = None) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(TIMEOUT)
        self.place = Moving(DialTarget(Endpoint(*self.listener.getsockname())))
        self.connections: list[socket.socket] = []
        self.delivered: list[Notification] = []
        self.link = TcpLink(
            self.place, JOB, NodeId("", 1, 7), deliver or self.delivered.append, Deadline.after(TIMEOUT)
        )

    def welcomes(self, incarnation: str = "server-0") -> Session:
        """Open the next session."""
        self.listener.settimeout(TIMEOUT)
        connection, _ = self.listener.accept()
        self.connections.append(connection)
        connection.settimeout(TIMEOUT)
        session = Session(connection)
        codec.decode(session.next(), Hello)
        connection.sendall(MAGIC + frame(codec.encode(Welcome(3600.0, incarnation))))
        until(lambda: self.link._state is LinkState.OPEN)
        return session

    def is_dialed_again(self, within: float = 0.3) -> bool:
        self.listener.settimeout(within)
        try:
            self.listener.accept()[0].close()
        except TimeoutError:
            return False
        return True

    def waits_for(self, kind: type[N]) -> N:
        """The first notification of a kind."""
        until(lambda: any(isinstance(notice, kind) for notice in self.delivered))
        return next(notice for notice in self.delivered if isinstance(notice, kind))


class Session(SocketNode):
    """The coordinator's end of a session."""

    def requests(self) -> list[object]:
        """The node's requests until the connection closes, without heartbeats."""
        found: list[object] = []
        while True:
            try:
                request = codec.decode_request(self.next())
            except (AssertionError, ConnectionError):
                return found
            if not isinstance(request, Heartbeat):
                found.append(request)


@contextmanager
def meeting(deliver: Callable[[Notification], None] | None = None) -> Iterator[Meeting]:
    made = Meeting(deliver)
    with made.listener, closing(made.link):
        try:
            yield made
        finally:
            for connection in made.connections:
                connection.close()


@contextmanager
def opened() -> Iterator[tuple[Meeting, Session]]:
    with meeting() as job:
        yield job, job.welcomes()


def garbled(kind: type) -> bytes:
    """A message of this kind whose fields are nonsense."""
    return frame(msgspec.msgpack.encode((codec._TAGS[kind], "nonsense")))


def test_an_unreadable_notification_ends_the_link() -> None:
    with opened() as (job, session):
        session.made.sendall(garbled(JobEnded))
        lost = job.waits_for(LinkLost)
        assert "sent a message that this node cannot read: Expected `array`, got `str`" in lost.detail
        (leave,) = session.requests()
        assert leave == LeaveRequest(why=lost.detail), "the coordinator is told why"
        assert not job.is_dialed_again()
        assert kinds(job.delivered) == [LinkOpened, LinkLost]


def test_an_unreadable_expendable_notification_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    with opened() as (job, session), caplog.at_level(logging.WARNING, "rallypoint"):
        session.made.sendall(garbled(NodesWaiting))
        session.says(NodesWaiting(0, 1))
        assert job.waits_for(NodesWaiting) == NodesWaiting(0, 1)
        assert kinds(job.delivered) == [LinkOpened, NodesWaiting]
    assert (
        "a NodesWaiting message was dropped because it could not be read (Expected `array`, got `str`)"
        in caplog.messages
    )


def test_an_error_of_the_receiver_ends_the_link() -> None:
    delivered: list[Notification] = []

    def deliver(notification: Notification) -> None:
        if isinstance(notification, NodesWaiting):
            raise OSError("no space left on device")
        delivered.append(notification)

    with meeting(deliver) as job:
        session = job.welcomes()
        session.says(NodesWaiting(0, 1))
        until(lambda: len(delivered) > 1)
        opened, lost = delivered
        assert isinstance(opened, LinkOpened)
        assert isinstance(lost, LinkLost)
        assert lost.detail.endswith(f"{job.place}: OSError: no space left on device")
        assert session.requests() == [LeaveRequest(why=lost.detail)]
        assert not job.is_dialed_again()


def test_a_request_that_cannot_be_sent_ends_the_link() -> None:
    with opened() as (job, session):
        job.link.send(NodeReport(0, output_ages=(math.nan,)))  # it is dropped, since the job does not need it
        job.link.send(Fail(0, CAUSE._replace(host="half a pair: \udcff"), 1))  # its text is cleaned
        for _ in range(2):
            job.link.send(Fail(0, CAUSE, 1 << 40))
        lost = job.waits_for(LinkLost)
        assert lost.detail == (
            "this node's message to the control plane cannot be sent: a Fail whose max_restarts is 1099511627776 is "
            "refused; it must be from -1 to 2147483648"
        )
        cleaned = Fail(0, CAUSE._replace(host="half a pair: ?"), 1)
        assert session.requests() == [cleaned, LeaveRequest(why=lost.detail)]
        assert not job.is_dialed_again()
        assert kinds(job.delivered) == [LinkOpened, LinkLost], "once"


def test_a_session_ends_with_the_server_s_reason() -> None:
    with opened() as (job, session):
        session.says(SessionEnded("its node opened another one"))
        down = job.waits_for(LinkDown)
        assert down.detail.endswith("was lost (its node opened another one)")
        assert session.requests() == [], "it is not told to leave"
        job.welcomes()
        job.waits_for(LinkUp)


def test_a_permanent_end_of_a_session_ends_the_link() -> None:
    with opened() as (job, session):
        session.says(SessionEnded("go away", is_permanent=True))
        lost = job.waits_for(LinkLost)
        assert lost == LinkLost(f"the control plane at {job.place} ended the session of this node: go away")
        assert session.requests() == []
        assert not job.is_dialed_again()


def test_a_session_survives_an_endpoint_that_cannot_be_resolved() -> None:
    errors: list[object] = []
    with opened() as (job, session):
        loop = job.link._loop.loop
        loop.set_exception_handler(lambda _loop, context: errors.append(context))
        job.place.error = HandshakeError("etcd needs a password")
        job.link.recheck_endpoint()
        session.says(NodesWaiting(0, 1))
        job.waits_for(NodesWaiting)
        loop.set_exception_handler(None)
        assert job.link._state is LinkState.OPEN
    assert not errors


def test_a_link_closed_during_a_cut_sends_its_requests() -> None:
    with opened() as (job, session):
        session.says(FaultRequested("u@h", Fault.CUT, -1, TIMEOUT))
        job.waits_for(FaultRequested)
        until(lambda: job.link._state is LinkState.CUT)
        job.link.send(NextStore(0, 7001))
        job.link.close()
        assert session.requests() == [NextStore(0, 7001), LeaveRequest()]


def test_a_link_follows_its_control_plane_after_a_cut() -> None:
    with meeting() as job:
        session, began = job.welcomes(), time.monotonic()
        session.says(FaultRequested("u@h", Fault.CUT, -1, 0.4))
        until(lambda: job.link._state is LinkState.CUT)
        place = job.place.target
        job.place.target = place._replace(flag="--elsewhere")
        job.link.recheck_endpoint()
        assert session.requests() == []
        assert time.monotonic() >= began + 0.4
        job.welcomes()


def test_link_states() -> None:
    with meeting() as job:
        states = [job.link._state]
        job.link.send(JOIN)
        session = job.welcomes()
        states.append(job.link._state)
        session.says(JoinRefused(Refusal.TIMEOUT, "too few"))
        job.waits_for(JoinRefused)
        session.made.close()
        until(lambda: job.link._state is LinkState.IDLE)
        assert not job.is_dialed_again(), "it needs no control plane"
        job.link.send(JOIN)
        session = job.welcomes()
        session.says(JobEnded(Verdict(Outcome.STOPPED)))
        session.says(SessionEnded("the job is over", is_permanent=True))
        until(lambda: job.link._state is LinkState.ENDED)
        job.link.send(Fail(0, CAUSE, 1 << 40))
        job.link.close()
        assert states == [LinkState.DIALING, LinkState.OPEN]
        assert kinds(job.delivered) == [LinkOpened, JoinRefused, LinkDown, LinkUp, JobEnded]
