"""Law 17: each request of the protocol, sent as fast as one connection can, leaves the loop to the others.

The server and the flood's connection are real, in a job of 1,000 nodes; the nodes are sessions without sockets, whose
notifications are encoded. The tests assert the processor time of one turn of the loop, since others' heartbeats wait
for one turn at most; `benchmarks/floods.py` measures how long they wait, with real connections.
"""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from unittest.mock import patch

import pytest

from rallypoint.control.coordinator.coordinator import Coordinator
from rallypoint.control.coordinator.dispatcher import Dispatcher, RestoredState
from rallypoint.control.coordinator.server import ControlServer
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import Close, NodeId, NodeInfo, Settings, State
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.codec import frame
from rallypoint.control.protocol.handshake import ClientHandshake
from rallypoint.control.protocol.messages import JoinRequest, LeaveRequest, Notification
from rallypoint.observe.watching.messages import (
    Snapshot,
    SnapshotPart,
    WatcherRequest,
    WatchRequest,
    decode_snapshot,
    decode_watcher_notification,
)
from rallypoint.observe.watching.session import JobWatch, copy_of_job
from tests import effort
from tests.unit.coordinator.floods import OF_NODES, OF_WATCHERS
from tests.unit.coordinator.sockets import TIMEOUT, SocketNode, connected, serving
from tests.waiting import until

NODES = 1000
LONGEST_TURN = 0.25
"""Seconds of processor time: some milliseconds are expected, and a garbage collection may fall into it."""
SETTINGS = Settings("job", NODES, NODES, lease=3600.0)


class TurnClock:
    """The longest turn of a server's loop, in processor time of its thread."""

    def __init__(self, server: ControlServer) -> None:
        self.longest = 0.0
        self.turns = 0
        self._server = server
        self._before = 0.0
        self._ended = threading.Event()
        self._stopped = threading.Event()

    def __enter__(self) -> TurnClock:
        self._server._loop.call(self._begin)
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        assert self._stopped.wait(TIMEOUT)

    def _begin(self) -> None:
        self._before = time.thread_time()
        self._server._loop.loop.call_soon(self._look)

    def _look(self) -> None:
        now = time.thread_time()
        self.longest, self._before, self.turns = max(self.longest, now - self._before), now, self.turns + 1
        if self._ended.is_set():
            self._stopped.set()
        else:
            self._server._loop.loop.call_soon(self._look)


def encoded(notification: Notification) -> None:
    codec.encode(notification)


@cache
def running_round() -> State:
    """The state of a job with a running round."""
    dispatcher = Dispatcher(SETTINGS)
    for number in range(NODES):
        node = NodeId(f"10.0.{number >> 8}.{number & 255}", 1, number, f"n{number}")
        session = dispatcher.attach(encoded, SessionRecord(node, node.addr, leased=False))
        dispatcher.receive(session, JoinRequest(NodeInfo("default", 1, "", 7000, max_restarts=9), 600.0))
    assert dispatcher.state.complete
    return dispatcher.state


def filled() -> Dispatcher:
    """A job with a running round, with a session for each node."""
    dispatcher = Dispatcher(SETTINGS, restored=RestoredState("before", running_round()))
    for node in running_round().participants:
        dispatcher.attach(encoded, SessionRecord(node, node.addr, leased=False))
    copy_of_job(dispatcher)()  # imports for the first watcher are not part of a turn
    return dispatcher


HELLO = ClientHandshake("job", None, b"n", SETTINGS).hello("127.0.0.1", NodeId("127.0.0.1", 1, NODES + 1))


def flood(node: SocketNode, payload: bytes, seconds: float, is_enough: Callable[[], bool]) -> None:
    """Send a message repeatedly and read the answers, until the server disconnects."""
    data = frame(payload) * (1 + 65536 // len(payload))
    made, left = node.made, memoryview(data)
    made.setblocking(False)
    until = time.monotonic() + seconds
    while time.monotonic() < until or not is_enough():
        idle = True
        try:
            with suppress(BlockingIOError):
                left = left[made.send(left) :] or memoryview(data)
                idle = False
            with suppress(BlockingIOError):
                if not made.recv(1 << 20):
                    return
                idle = False
        except OSError:  # the server has disconnected
            return
        if idle:
            time.sleep(0.001)  # both sides wait for the server


@pytest.mark.parametrize(
    ("payload", "is_watcher"),
    [
        *(pytest.param(sample, False, id=f"node-{name}") for name, sample in OF_NODES.items()),
        *(pytest.param(sample, True, id=f"watcher-{name}") for name, sample in OF_WATCHERS.items()),
    ],
)
def test_a_flood_leaves_the_loop_to_others(request: pytest.FixtureRequest, payload: object, is_watcher: bool) -> None:
    request.addfinalizer(gc.unfreeze)
    gc.freeze()  # objects of other tests; an agent freezes its own at its start
    dispatcher = filled()
    dispatcher.remote_control = True
    hello = HELLO._replace(is_watcher=is_watcher, job="" if is_watcher else "job")
    with serving(dispatcher) as server, connected(server.port, hello) as node:
        with TurnClock(server) as clock:
            flood(node, codec.encode(payload), 2.0 if effort.is_fresh() else 0.2, lambda: clock.turns > 20)
        assert clock.longest < LONGEST_TURN


def test_a_watcher_that_does_not_read_gets_no_more_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = filled()
    handled: list[object] = []
    receive = JobWatch.receive

    def counting(watch: JobWatch, request: WatcherRequest, refusal: str = "") -> None:
        handled.append(request)
        receive(watch, request, refusal)

    monkeypatch.setattr(JobWatch, "receive", counting)
    asked = 3000
    with serving(dispatcher) as server, connected(server.port, HELLO._replace(is_watcher=True), 4096) as watcher:
        (connection,) = server.connections
        watcher.made.sendall(frame(codec.encode(WatchRequest(first=0))) * asked)
        until(lambda: bool(connection._transport.unsent))
        before = len(handled)
        assert before < asked, "until the sockets are full"
        with connected(server.port, HELLO._replace(node=HELLO.node._replace(number=NODES + 2))) as node:
            for _ in range(10):
                node.says(OF_NODES["ConfirmRequest"])
                node.next()
        assert len(handled) == before, "and no more"
        while len(handled) < asked:
            assert isinstance(decode_watcher_notification(watcher.next()), SnapshotPart)


def test_a_follower_gets_the_end_from_a_server_that_closes() -> None:
    dispatcher = filled()
    with serving(dispatcher) as server, connected(server.port, HELLO._replace(is_watcher=True)) as watcher:
        watcher.says(WatchRequest(after=0))
        assert not next_snapshot(watcher).detail
        dispatcher.receive(1, Close(detail="on request"))
        server.close()
        assert "on request" in next_snapshot(watcher).detail


def next_snapshot(watcher: SocketNode) -> Snapshot:
    data = b""
    while isinstance(part := decode_watcher_notification(watcher.next()), SnapshotPart):
        data += part.data
        if part.is_last:
            return decode_snapshot(data)
    raise AssertionError(part)


def test_the_last_request_is_handled_after_thousands() -> None:
    dispatcher = filled()
    with serving(dispatcher) as server, connected(server.port, HELLO) as node:
        requests = [*[OF_NODES["ConfirmRequest"]] * 3000, LeaveRequest(why="drained by ann")]
        receive = dispatcher._coordinator._RECEIVE[LeaveRequest]
        reasons: list[str] = []

        def leaves(self: Coordinator, speaker: SessionRecord, request: LeaveRequest, now: float) -> None:
            reasons.append(request.why)
            receive(self, speaker, request, now)

        with patch.dict(dispatcher._coordinator._RECEIVE, {LeaveRequest: leaves}):
            node.made.sendall(b"".join(frame(codec.encode(request)) for request in requests))
            node.made.shutdown(socket.SHUT_WR)  # the answers are read, or the kernel would break the connection
            while node.made.recv(1 << 20):
                pass
            until(lambda: not server.connections)
        assert reasons == ["drained by ann"]
