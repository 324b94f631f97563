"""What a server grants connections that are no nodes, that do not read, or that come when it is busy."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import cast

import pytest

from rallypoint.base.endpoint import listening_socket
from rallypoint.base.loop import LoopThread
from rallypoint.control.coordinator import server as server_module
from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.coordinator.jobs import ManyJobs
from rallypoint.control.coordinator.server import ControlServer
from rallypoint.control.membership.state import NodeId, Settings
from rallypoint.control.protocol.handshake import ClientHandshake, Hello
from rallypoint.control.protocol.messages import CollectedPart, NodesWaiting, SessionEnded
from rallypoint.observe.watching.messages import JobList, ListRequest, decode_watcher_notification
from tests.unit.coordinator.sockets import SocketNode, serving
from tests.unit.coordinator.test_control import TIMEOUT
from tests.waiting import until

HELLO = ClientHandshake("", None, b"n", Settings("", 1, 1)).hello("127.0.0.1", NodeId("127.0.0.1", 1, 0))


def greeted(server: ControlServer, hello: Hello) -> socket.socket:
    """A connection that has greeted, and has proved what there is to prove."""
    raw = socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT)
    SocketNode(raw).greets(hello)
    return raw


def test_a_watcher_that_names_its_job_is_not_told_of_others() -> None:
    jobs = ManyJobs()
    jobs.dispatcher_for(HELLO._replace(job="job"), "127.0.0.1")
    with serving(jobs) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT) as raw:
            of_any = SocketNode(raw)
            of_any.greets(HELLO._replace(is_watcher=True))
            of_any.says(ListRequest())
            assert isinstance(decode_watcher_notification(of_any.next()), JobList)
        with socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT) as raw:
            of_one = SocketNode(raw)
            of_one.greets(HELLO._replace(is_watcher=True, job="job"))
            of_one.says(ListRequest())
            ended = decode_watcher_notification(of_one.next())
            assert isinstance(ended, SessionEnded)
            assert (ended.detail, ended.is_permanent) == (
                "jobs are listed only for watchers that do not name one",
                True,
            )
            assert raw.recv(1000) == b"", "it closed the connection"


@pytest.mark.parametrize(
    "hello",
    [HELLO._replace(only_greets=True), HELLO._replace(is_watcher=True)],
    ids=["only greets", "watches no job"],
)
def test_who_has_been_answered_counts_as_no_session_and_makes_room(hello: Hello) -> None:
    with serving(ManyJobs()) as server, greeted(server, hello) as raw:
        assert server._connections is not None
        limiter = server._connections.limiter
        assert len(limiter._waiting) == 1
        server._loop.call(cast("Callable[[], None]", limiter.make_room))
        while raw.recv(1000):
            pass


def test_much_that_was_collected_does_not_end_the_session_of_who_reads_it_slowly() -> None:
    dispatcher = Dispatcher(Settings("job", 1, 1))
    with serving(dispatcher) as server, greeted(server, HELLO._replace(job="job")) as raw:
        (connection,) = server.connections
        part = CollectedPart(1, bytes(48 * 1024), False, "n1")
        for _ in range(200):
            connection.post(part)
        transport = connection._transport
        until(lambda: len(transport.unsent) > 4 * 1024 * 1024 or transport.is_closing)
        assert not transport.is_closing
        for number in range(200):
            connection.post(NodesWaiting(number, 1, ("x" * 40_000,)))
        until(lambda: transport.is_closing)
        raw.close()


def test_a_server_whose_loop_is_busy_is_closed_in_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_module, "_CLOSE_TIMEOUT", 0.2)
    loop, busy = LoopThread("busy"), threading.Event()
    server = ControlServer(Dispatcher(Settings("job", 1, 1)), listening_socket("127.0.0.1", 0), loop=loop)
    loop.call(cast("Callable[[], None]", busy.wait))
    with caplog.at_level(logging.WARNING):
        server.close(linger=0.0)
    assert "did not close within" in caplog.text
    busy.set()
    server.close(linger=0.0)
    loop.stop()
