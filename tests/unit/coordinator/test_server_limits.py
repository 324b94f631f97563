"""Limits for connections that are not nodes or do not read, and closing a busy server."""

from __future__ import annotations

import logging
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
from tests.unit.coordinator.sockets import connected, serving
from tests.waiting import until

HELLO = ClientHandshake("", None, b"n", Settings("", 1, 1)).hello("127.0.0.1", NodeId("127.0.0.1", 1, 0))


def test_a_watcher_of_one_job_gets_no_list() -> None:
    jobs = ManyJobs()
    jobs.dispatcher_for(HELLO._replace(job="job"), "127.0.0.1")
    with serving(jobs) as server:
        with connected(server.port, HELLO._replace(is_watcher=True)) as watcher:
            watcher.says(ListRequest())
            assert isinstance(decode_watcher_notification(watcher.next()), JobList)
        with connected(server.port, HELLO._replace(is_watcher=True, job="job")) as watcher:
            watcher.says(ListRequest())
            ended = SessionEnded("jobs are listed only for watchers that do not name one", is_permanent=True)
            assert decode_watcher_notification(watcher.next()) == ended
            assert watcher.made.recv(1000) == b"", "the connection is closed"


@pytest.mark.parametrize(
    "hello", [HELLO._replace(only_greets=True), HELLO._replace(is_watcher=True)], ids=["only greets", "watches no job"]
)
def test_answered_connections_without_a_job_can_be_closed_for_others(hello: Hello) -> None:
    with serving(ManyJobs()) as server, connected(server.port, hello) as peer:
        assert server._connections is not None
        limiter = server._connections.limiter
        assert len(limiter._waiting) == 1
        server._loop.call(cast("Callable[[], None]", limiter.make_room))
        while peer.made.recv(1000):
            pass


def test_a_slow_reader_of_a_collection_keeps_its_session() -> None:
    with serving(Dispatcher(Settings("job", 1, 1))) as server, connected(server.port, HELLO._replace(job="job")):
        (connection,) = server.connections
        for _ in range(200):
            connection.post(CollectedPart(1, bytes(48 * 1024), False, "n1"))
        transport = connection._transport
        until(lambda: len(transport.unsent) > 4 * 1024 * 1024 or transport.is_closing)
        assert not transport.is_closing
        for number in range(200):
            connection.post(NodesWaiting(number, 1, ("x" * 40_000,)))
        until(lambda: transport.is_closing)


def test_a_busy_server_is_closed_in_time(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
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
