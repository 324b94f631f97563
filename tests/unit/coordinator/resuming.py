"""Nodes that resume their sessions with one coordinator after another: links without a wire, on a manual clock."""

from __future__ import annotations

from rallypoint.control.coordinator.dispatcher import Dispatcher, RestoredState
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import NodeId, NodeInfo, Settings, State
from rallypoint.control.protocol.messages import Heartbeat, JoinRequest, Notification, Request
from rallypoint.control.protocol.resume_state import (
    ResumeState,
    after_notification,
    after_request,
    requests_to_repeat,
    without_foreign_join,
)
from rallypoint.failures.cause import Cause
from tests.unit.clocks import HandClock

CAUSE = Cause(0, 0, "h", 42, 1, "boom", "", 0.0, "")


class Journal:
    """Stores states on request of the test."""

    def __init__(self, stored: State | None = None) -> None:
        self.newest: tuple[int, State] | None = None
        self.awaited = 0
        self.stored = stored or State()

    def append(self, number: int, state: State, awaited: int) -> None:
        self.newest = (number, state)
        self.awaited = awaited


class Node:
    """A node's link."""

    def __init__(self, number: int) -> None:
        self.id = NodeId(f"h{number}", 1, number)
        self.port = 7000 + number
        self.held = ResumeState()
        self.session = 0
        self.told: list[Notification] = []

    def hear(self, notice: Notification) -> None:
        self.held = after_notification(self.held, notice, 0.0)
        self.told.append(notice)


class Job:
    """Nodes, their coordinator's dispatcher, and its journal. Without a journal, notifications are sent at once."""

    def __init__(self, nodes: int, least: int = 1, most: int = 0, *, has_journal: bool = True) -> None:
        self.settings = Settings("job", least, most or nodes, last_call_timeout=5.0)
        self.time = HandClock()
        self.has_journal = has_journal
        self.nodes = [Node(number) for number in range(nodes)]
        self._start()
        for node in self.nodes:
            self.open(node)
            self.join(node)
        self.store()

    @property
    def state(self) -> State:
        return self.dispatcher.state

    def _start(self, restored: RestoredState | None = None) -> None:
        """Start a coordinator, to which no node has a session yet."""
        self.journal = Journal(restored.state if restored else None)
        journal = self.journal if self.has_journal else None
        self.dispatcher = Dispatcher(self.settings, self.time, restored=restored, journal=journal)
        for node in self.nodes:
            node.session = 0

    def open(self, node: Node) -> None:
        node.session = self.dispatcher.attach(node.hear, SessionRecord(node.id, node.id.addr))
        waited = node.held.join is not None
        node.held = without_foreign_join(node.held, self.dispatcher.incarnation)
        again = requests_to_repeat(node.held, self.time.now)
        node.held = node.held._replace(opened=self.dispatcher.incarnation)
        for request in again:
            self.dispatcher.receive(node.session, request)
        if waited and node.held.join is None and not any(isinstance(request, JoinRequest) for request in again):
            self.join(node)

    def say(self, node: Node, request: Request) -> None:
        node.held = after_request(node.held, request, self.time.now)
        if node.session:
            self.dispatcher.receive(node.session, request)

    def join(self, node: Node) -> None:
        self.say(node, JoinRequest(NodeInfo("default", 1, "", node.port), 600.0))

    def beat(self, node: Node) -> None:
        """Send a heartbeat, which the connection itself answers."""
        if self.dispatcher.heartbeat(node.session):
            node.hear(Heartbeat())

    def store(self) -> None:
        """Let the journal store the newest state."""
        if self.journal.newest is not None:
            number, self.journal.stored = self.journal.newest
            self.dispatcher.journal_written(number)

    def succeeded(self) -> None:
        """Replace the coordinator by one that continues with the stored state."""
        self._start(RestoredState(self.dispatcher.incarnation, self.journal.stored))

    def forgotten(self) -> None:
        """Replace the coordinator by one that knows nothing."""
        self._start()

    def passed_over(self) -> None:
        """A coordinator that knows and stores nothing comes and goes; the next one restores what was stored before."""
        before = RestoredState(self.dispatcher.incarnation, self.journal.stored)
        self.forgotten()
        for node in self.nodes:
            node.port += 100  # a new join brings another store
            self.open(node)
            self.beat(node)
        self._start(before)
        for node in self.nodes:
            node.port += 100

    def heartbeats(self, seconds: float) -> None:
        """Let time pass, in which the nodes with sessions send heartbeats."""
        until = self.time.now + seconds
        while self.time.now < until:
            self.time.now += 0.5
            for node in self.nodes:
                if node.session:
                    self.beat(node)
            self.dispatcher.tick()
            self.store()
