"""The shell of the coordinator: calls from several threads, and messages that cannot be sent."""

from __future__ import annotations

import errno
import queue
import threading
from functools import partial

import pytest

from rallypoint.base.endpoint import listening_socket
from rallypoint.base.loop import LoopThread
from rallypoint.control.coordinator import connection
from rallypoint.control.coordinator.dispatcher import Dispatcher, LocalLink, Turns
from rallypoint.control.coordinator.server import ControlServer
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import Fail, NodeId, NodeInfo, RecordProgress, Settings
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.messages import (
    JoinRequest,
    LinkLost,
    NodeReport,
    Notification,
    Placed,
    RoundEnded,
)
from rallypoint.observe.rendezvous_log import JobLog
from rallypoint.observe.watching.messages import SnapshotPart, WatcherNotification, WatchRequest, decode_snapshot
from rallypoint.observe.watching.session import JobWatch, copy_of_job
from tests.unit.coordinator.test_control import CAUSE

NODE, OTHER = NodeId("10.0.0.1", 1, 1, "a"), NodeId("10.0.0.2", 2, 2, "b")
INFO = NodeInfo("default", 1, "", 7000, max_restarts=3)


def test_threads_take_turns_until_a_loop_takes_over() -> None:
    turns, loop = Turns(), LoopThread("test")
    ran, inside = list[tuple[int, int]](), list[int]()

    def turn(thread: int, number: int) -> None:
        inside.append(thread)
        assert inside == [thread], "two turns at a time"
        ran.append((thread, number))
        inside.clear()

    def calls(thread: int) -> None:
        for number in range(2000):
            turns.call(partial(turn, thread, number))

    threads = [threading.Thread(target=calls, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    loop.call(lambda: turns.move_to(loop))
    for thread in threads:
        thread.join()
    idents = queue.SimpleQueue[int]()
    loop.call(lambda: idents.put(threading.get_ident()))
    loop_thread = idents.get(timeout=10)
    turns.call(lambda: idents.put(threading.get_ident()))
    assert idents.get(timeout=10) == loop_thread
    for caller in range(4):
        assert [number for thread, number in ran if thread == caller] == list(range(2000))
    loop.stop()


def test_a_snapshot_is_of_the_moment_of_its_request() -> None:
    dispatcher, link, _, _ = joined_by_two()
    make_snapshot = copy_of_job(dispatcher)
    link.close()
    assert [node.host for node in make_snapshot().nodes] == ["a", "b"]


def joined_by_two() -> tuple[Dispatcher, LocalLink, list[Notification], list[Notification]]:
    """A round of the coordinator's host and another node, and the notifications to each."""
    own, other = list[Notification](), list[Notification]()
    dispatcher = Dispatcher(Settings("job", 2, 2))
    link = LocalLink(dispatcher, NODE, own.append, NODE.addr)
    session = dispatcher.attach(other.append, SessionRecord(OTHER, OTHER.addr, leased=False))
    link.send(JoinRequest(INFO._replace(program="caf\udce9.py"), 600.0))
    dispatcher.receive(session, JoinRequest(INFO, 600.0))
    assert any(isinstance(notice, Placed) for notice in other)
    return dispatcher, link, own, other


def test_requests_of_the_hosting_node_can_be_encoded_for_others() -> None:
    _, link, own, other = joined_by_two()
    link.send(Fail(0, CAUSE._replace(message="\udcff" * 20_000, host="h\x1b"), 3))
    (end,) = (notice for notice in other if isinstance(notice, RoundEnded))
    payload = codec.sendable(end)
    assert codec.decode_notification(payload) == end
    assert end.end.cause is not None
    assert (end.end.cause.message, end.end.cause.host) == ("?" * 8192, "h?")
    assert own


def test_a_report_with_any_bytes_is_shown() -> None:
    dispatcher, link, _, _ = joined_by_two()
    parts: list[WatcherNotification] = []
    watch = JobWatch(dispatcher, parts.append, lambda _why: None)
    watch.receive(WatchRequest())
    link.send(NodeReport(0, (7,), log_folder="logs\udcff", command="train --data=caf\udce9"))
    watch.receive(WatchRequest(node="a"))
    data = b"".join(each.data for each in parts if isinstance(each, SnapshotPart))
    report = decode_snapshot(data).nodes[0].report
    assert report is not None
    assert (report.log_folder, report.command) == ("logs?", "train --data=caf?")


def test_numbers_out_of_range_are_dropped_or_end_the_link(caplog: pytest.LogCaptureFixture) -> None:
    dispatcher, link, own, _ = joined_by_two()
    link.send(RecordProgress(0, 1 << 70))
    assert dispatcher.state.complete
    assert (
        "a RecordProgress message was dropped because it could not be sent (a RecordProgress whose step is"
        in caplog.text
    )
    link.send(Fail(0, CAUSE, 1 << 40))
    assert isinstance(own[-1], LinkLost)
    assert "a Fail whose max_restarts is 1099511627776 is refused" in own[-1].detail


def test_an_error_of_an_observer_does_not_stop_a_message(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise ImportError("upgraded in place")

    monkeypatch.setattr(JobLog, "on_message", refuse)
    dispatcher, told = Dispatcher(Settings("job", 2, 2)), list[Notification]()
    for number, node in enumerate((NODE, OTHER)):
        session = dispatcher.attach(told.append, SessionRecord(node, node.addr, leased=False))
        dispatcher.receive(session, JoinRequest(INFO._replace(program=f"{number}.py"), 600.0))
    assert sum(isinstance(message, Placed) for message in told) == 2
    assert "a message could not be inspected but will be sent anyway" in caplog.text


def test_a_server_that_fails_to_start_closes_its_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(connection, "Connections", refuse)
    listener, loop = listening_socket("127.0.0.1", 0), LoopThread("test")
    server = ControlServer(Dispatcher(Settings("job", 1, 1)), listener, loop=loop)
    server.close()
    assert listener.fileno() == -1
    loop.stop()
