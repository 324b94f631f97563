"""The shell around the coordinator: what several threads do to it, and what it does with what cannot be sent."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from rallypoint.control.coordinator.dispatcher import Dispatcher, LocalLink
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import Fail, NodeId, NodeInfo, RecordProgress, Settings
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.messages import (
    ConfirmRequest,
    JoinRequest,
    LinkLost,
    NodeReport,
    Notification,
    Placed,
    RoundEnded,
)
from rallypoint.control.protocol.observation import SnapshotPart, WatcherNotification, WatchRequest, decode_snapshot
from tests.unit.coordinator.test_control import CAUSE

NODE, OTHER = NodeId("10.0.0.1", 1, 1, "a"), NodeId("10.0.0.2", 2, 2, "b")
INFO = NodeInfo("default", 1, "", 7000, max_restarts=3)


class Guarded(deque[Any]):
    """A queue whose entries nobody may use without the lock: another thread could take them after a look."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__()
        self._dispatcher = dispatcher

    def __getitem__(self, at: Any) -> Any:
        assert self._dispatcher._lock.locked()
        return super().__getitem__(at)

    def popleft(self) -> Any:
        assert self._dispatcher._lock.locked()
        return super().popleft()


def test_the_outbox_is_looked_at_with_the_lock_alone() -> None:
    dispatcher, told = Dispatcher(Settings("job", 1, 8)), list[Notification]()
    dispatcher._outbox = Guarded(dispatcher)
    session = dispatcher.attach(told.append, SessionRecord(NODE, NODE.addr, leased=False))
    for number in range(3):
        dispatcher.receive(session, ConfirmRequest(number))
    assert len(told) == 3


def joined_by_two() -> tuple[Dispatcher, LocalLink, list[Notification], list[Notification]]:
    """A round of the node that hosts the coordinator and of another one; what each is told."""
    own, other = list[Notification](), list[Notification]()
    dispatcher = Dispatcher(Settings("job", 2, 2))
    link = LocalLink(dispatcher, NODE, own.append, NODE.addr)
    session = dispatcher.attach(other.append, SessionRecord(OTHER, OTHER.addr, leased=False))
    link.send(JoinRequest(INFO._replace(program="caf\udce9.py"), 600.0))
    dispatcher.receive(session, JoinRequest(INFO, 600.0))
    assert any(isinstance(each, Placed) for each in other)
    return dispatcher, link, own, other


def test_what_the_hosting_node_says_can_be_told_to_all_others() -> None:
    _, link, own, other = joined_by_two()
    link.send(Fail(0, CAUSE._replace(message="\udcff" * 20_000, host="h\x1b"), 3))
    (end,) = (each for each in other if isinstance(each, RoundEnded))
    payload = codec.sendable(end)
    assert codec.decode_notification(payload) == end
    assert end.end.cause is not None
    assert (end.end.cause.message, end.end.cause.host) == ("?" * 8192, "h?")
    assert own


def test_a_report_with_any_bytes_is_shown() -> None:
    dispatcher, link, _, _ = joined_by_two()
    parts: list[WatcherNotification] = []
    watcher = dispatcher.attach_watcher(parts.append, lambda _why: None)
    dispatcher.receive_from_watcher(watcher, WatchRequest())
    link.send(NodeReport(0, (7,), log_folder="logs\udcff", command="train --data=caf\udce9"))
    dispatcher.receive_from_watcher(watcher, WatchRequest(node="a"))
    data = b"".join(each.data for each in parts if isinstance(each, SnapshotPart))
    report = decode_snapshot(data).nodes[0].report
    assert report is not None
    assert (report.log_folder, report.command) == ("logs?", "train --data=caf?")


def test_a_number_that_nobody_could_be_told_is_dropped_or_ends_the_link(caplog: pytest.LogCaptureFixture) -> None:
    dispatcher, link, own, _ = joined_by_two()
    link.send(RecordProgress(0, 1 << 70))
    assert dispatcher.state.complete
    assert "a RecordProgress is dropped: it cannot be sent (a RecordProgress whose step is" in caplog.text
    link.send(Fail(0, CAUSE, 1 << 40))
    assert isinstance(own[-1], LinkLost)
    assert "a Fail whose max_restarts is 1099511627776 is refused" in own[-1].detail
