"""The control server's process: production coordinator, dispatcher and handshake; a shell as thin as `connection`.

It lives in a process of its own, or in that of the node that hosts it or was elected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING

from rallypoint.control.coordinator.coordinator import Coordinator, StepResult
from rallypoint.control.coordinator.dispatcher import Dispatcher, JournalSink, RestoredState, do_nothing
from rallypoint.control.coordinator.leader_lease import LeaderLease
from rallypoint.control.coordinator.session import ServerSession
from rallypoint.control.coordinator.sessions import SessionRecord, SessionState
from rallypoint.control.membership.state import NodeId, Reason, Settings, State
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.handshake import Hello, Keys
from rallypoint.control.protocol.messages import Heartbeat, Notification, Request, RoundEnded
from rallypoint.observe.watching.messages import (
    SnapshotPart,
    WatcherNotification,
    WatcherRequest,
    WatchRequest,
    decode_snapshot,
)
from rallypoint.observe.watching.session import JobWatch
from tests.sim.coroutine import SOON
from tests.sim.ground_truth import AuditStep
from tests.sim.network import Connection, Network
from tests.sim.world import Process, Timer

if TYPE_CHECKING:
    from tests.sim.audit import Audit

LINGER = 2.0
"""Seconds that nodes have to read the last notices once the server ends."""


class AuditedCoordinator(Coordinator):
    """The production coordinator, and each state that it has had since it was last looked at."""

    def __init__(self, settings: Settings, incarnation: str) -> None:
        self.states: list[State] = []
        super().__init__(settings, incarnation)

    def present(self) -> Collection[NodeId]:
        """Nodes that have a session."""
        return {each.node for each in self.sessions}

    @property
    def awaits_some(self) -> bool:
        """Whether it waits for nodes of a running round that it has no session with."""
        return self._all_released or self._placeholders_until is not None

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, State):
            self.states.append(value)
        super().__setattr__(name, value)


class AuditedDispatcher(Dispatcher):
    """The production dispatcher: what goes wrong in it ends the run, and the server sees all that it does."""

    def __init__(
        self,
        server: Server,
        settings: Settings,
        former: RestoredState,
        memory: JournalSink | None,
        lead: LeaderLease | None,
    ) -> None:
        super().__init__(settings, server.process, restored=former, journal=memory, lead=lead)
        self.coordinator = AuditedCoordinator(settings, former.incarnation)
        self.coordinator.restore(former.state, server.process.monotonic())
        del self.coordinator.states[:-1]
        self._coordinator = self.coordinator
        self._numbered = self._newest = self.coordinator.state
        self._server = server
        self._step = 0
        """The number of the newest state, as a journal counts them."""
        self._numbers_due: deque[int] = deque()

    def tick(self) -> None:
        """Time has passed."""
        now = self._clock.monotonic() if self._lead is None else self._now_as_leader(self._lead)
        self._carry_out(self._coordinator.tick(now))

    @property
    def job(self) -> str | None:
        """The one job that nodes must be of; None for a control plane outside of all jobs."""
        return super().job if self._server.home >= 0 else None

    def receive(self, session: int, request: Request) -> bool:
        """A request of a session."""
        with self._server.hearing(session, request):
            return super().receive(session, request)

    def detach(self, session: int, reason: Reason = Reason.LOST, detail: str = "") -> None:
        """A session has ended."""
        self._server.sessions.pop(session, None)
        with self._server.hearing(session, None):
            super().detach(session, reason, detail)

    def _carry_out(self, result: StepResult) -> None:
        if result.state is not self._newest:
            self._newest = result.state
            self._step += 1
        self._numbers_due += [self._step for _ in result.messages]
        for session, message in result.messages:
            if isinstance(message, RoundEnded) and message.keeps_place:
                self._server.audit.keeps_place(self._server.sessions[session].node)
        self._server.stepped(self._step)
        super()._carry_out(result)

    def _send(self, session: int, message: Notification | WatcherNotification) -> None:
        number = self._numbers_due.popleft()
        if isinstance(message, Notification):
            self._server.tells(number, message)
        super()._send(session, message)

    def _on_send_error(self, output: object) -> None:
        raise  # noqa: PLE0704 - the error that is being handled


class Server:
    """One life of the control server: at the endpoint, or for one term of an elected coordinator."""

    def __init__(
        self,
        process: Process,
        network: Network,
        settings: Settings,
        number: int,
        audit: Audit,
        home: int,
        *,
        former: RestoredState | None = None,
        memory: JournalSink | None = None,
        secret: bytes | None = None,
        lead: LeaderLease | None = None,
        host: int | None = None,
    ) -> None:
        self.process = process
        self.home = home
        self.number = number
        """Of its incarnation, which the terms of elected coordinators share."""
        self.audit = audit
        self.sessions: dict[int, SimSession | SimLocalSession] = {}
        self.ending = self.finished = False
        self.keys: Keys | None = None if secret is None else lambda _job: (secret,)
        self.steps: deque[AuditStep] = deque()
        """What it has done since its state was last kept, where it is kept."""
        self.kept = 0
        """The number of the newest state that is kept."""
        self.keeps = memory is not None
        self._unauthenticated: list[SimSession] = []
        """Connections that have not become sessions, and some that have."""
        self._network = network
        self._speaking: tuple[int | None, Request | WatcherRequest | None] = (None, None)
        self._watcher: JobWatch | None = None
        """The operator's session, once there is one."""
        self._parts = b""
        self._follows = False
        """Whether the operator asks again after each answer."""
        self._ticking = False
        self._timer: Timer | None = None
        self._timer_at = inf
        self.dispatcher = AuditedDispatcher(
            self, settings, former or RestoredState(f"server-{number}", State()), memory, lead
        )
        self.dispatcher.on_change = self._arm
        self.incarnation = self.dispatcher.incarnation
        self.port = network.listen(self, host)

    @property
    def coordinator(self) -> AuditedCoordinator:
        """The coordinator in the dispatcher."""
        return self.dispatcher.coordinator

    @property
    def alive(self) -> bool:
        """Whether it runs and takes nodes."""
        return self.process.alive and not self.ending

    def on_connect(self, connection: Connection) -> SimSession:
        """A connection has come in."""
        session = SimSession(self, connection)
        self._unauthenticated.append(session)
        return session

    def record(self, hello: Hello, *, leased: bool) -> SessionRecord:
        """What there is to know of the session of a node that greets so."""
        here = hello.node.pid == self.home
        return SessionRecord(
            hello.node,
            hello.address,
            "10.0.0.254" if leased else "",
            leased=leased,
            in_this_process=here,
            local=here,
            state=SessionState.RESUMING if hello.incarnation else SessionState.OPEN,
        )

    def attached(self, holder: SimSession | SimLocalSession) -> None:
        """A session is open."""
        self.audit.attached(self, holder.node)
        self.sessions[holder.number] = holder

    @contextmanager
    def hearing(self, number: int, request: Request | None) -> Iterator[None]:
        """What the coordinator does inside, it does for a request of that session; None if that has ended."""
        holder = None if request is None else self.sessions.get(number)
        if holder is not None and request is not None and not isinstance(request, Heartbeat):
            self.audit.hears(self, holder.node, request)
        before, self._speaking = self._speaking, (None if holder is None else holder.node, request)
        try:
            yield
        finally:
            self._speaking = before

    def operate(self, request: WatcherRequest) -> None:
        """An operator, who has no other name for the server than this one session, says something."""
        if not self.alive:
            return
        if self._watcher is None:
            self._watcher = JobWatch(self.dispatcher, self._tell_operator, lambda _why: None)
        if isinstance(request, WatchRequest):
            self._follows = request.after >= 0
        before, self._speaking = self._speaking, (None, request)
        try:
            self._watcher.receive(request)
        finally:
            self._speaking = before

    def _tell_operator(self, notification: WatcherNotification) -> None:
        if isinstance(notification, SnapshotPart):
            self._parts += notification.data
            if notification.is_last:
                seen = decode_snapshot(self._parts)
                self._parts = b""
                self.audit.shown(seen)
                if self._follows and not seen.detail:
                    self.process.later(SOON, self.operate, WatchRequest(after=seen.changes))
        else:
            self.process.world.note(self.process, "to the operator: %s", notification)

    def finish(self, done: Callable[[], None], linger: float = LINGER) -> None:
        """End in order: take no more nodes, let the last notices arrive; `done` when that is over."""
        self.ending = True
        self.dispatcher.on_change = do_nothing
        self._network.listen_no_more(self)
        for holder in (*self.sessions.values(), *self._unauthenticated):
            holder.finish()
        self._await_closes(self.process.monotonic() + linger, done)

    def stepped(self, number: int) -> None:
        """The coordinator has taken a step, after which its state has this number."""
        self.audit.after(self, *self._speaking, number)

    def tells(self, number: int, notice: Notification) -> None:
        """A node is about to be told what follows from the state of that number."""
        self.audit.tells(self, number, notice)

    def _await_closes(self, until: float, done: Callable[[], None]) -> None:
        if self.sessions and self.process.monotonic() < until:
            self.process.later(0.1, self._await_closes, until, done)
            return
        for holder in list(self.sessions.values()):
            holder.abort()
        self.finished = True
        done()

    # Inside

    def _tick(self) -> None:
        self._timer, self._timer_at = None, inf
        if self.ending:
            return
        self._ticking = True
        try:
            self.dispatcher.tick()
        finally:
            self._ticking = False

    def disconnected(self, holder: SimSession | SimLocalSession) -> None:
        """The coordinator has ended a session."""
        self.sessions.pop(holder.number, None)
        if self._ticking:
            self.audit.found_silent(self, holder)
        holder.abort()

    def _arm(self) -> None:
        at = self.dispatcher.wake_at()
        if at == self._timer_at or self.ending:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = at
        if at < inf:
            self._timer = self.process.later(max(SOON, at - self.process.monotonic()), self._tick)


class SimSession:
    """One connection, seen from the server: the production session, and a connection that carries its messages."""

    answers_all = is_written = True

    def __init__(self, server: Server, connection: Connection) -> None:
        self.process = server.process
        self.node = connection.node
        self.connection = connection
        self._server = server
        self._session = ServerSession(server.dispatcher, server.keys, b"server", self, "")
        self._registered = self._done = False

    @property
    def number(self) -> int:
        """Of the session."""
        return self._session.number

    def on_bytes(self, connection: Connection, payload: bytes) -> None:
        """One frame has come."""
        if self._done:
            return
        why = self._session.receive(payload)
        if self._session.is_open and not self._registered:
            self._registered = True
            self._server.attached(self)
        if why is not None:
            assert self._session.is_open, why
            self._done = True
            connection.close(1)

    def describe(self, hello: Hello) -> SessionRecord:
        """The handshake is done."""
        return self._server.record(hello, leased=True)

    def send(self, *payloads: bytes) -> None:
        """Send messages."""
        for payload in () if self._done else payloads:
            signers = self._session.signers
            self.connection.send(1, payload if signers is None else signers.outgoing.sign(payload))

    def on_end(self, connection: Connection, *, reset: bool) -> None:
        """The node has disconnected, or the connection is broken."""
        self.process.world.note(self.process, "loses node %d, %s", self.node, "reset" if reset else "disconnected")
        connection.close(1)
        self._detach("its connection has ended")

    def post(self, notification: Notification | WatcherNotification) -> None:
        """Send the node a notification."""
        self.process.world.note(self.process, "to node %d: %s", self.node, notification)
        self.send(codec.encode(notification))

    def disconnect(self, why: str = "") -> None:
        """The coordinator has ended the session."""
        self._server.disconnected(self)

    def finish(self) -> None:
        """Send what is left and say that nothing more comes; take no more requests."""
        self._done = True
        self.connection.close(1)

    def abort(self) -> None:
        """Disconnect at once."""
        self.process.world.note(self.process, "disconnects node %d", self.node)
        self.connection.abort(1)
        self._detach("the server has disconnected")

    def _detach(self, how: str) -> None:
        self._done = True
        self._session.detach(how)


class SimLocalSession:
    """The session of the node that hosts the server: no connection, no lease."""

    def __init__(self, server: Server, node: int, hello: Hello, deliver: Callable[[Notification], None]) -> None:
        self.node = node
        self.process = server.process
        self.address: str | None = f"10.0.0.{node}"
        self._server = server
        self._deliver = deliver
        self.number = server.dispatcher.attach(self._post, server.record(hello, leased=False))
        server.attached(self)

    def _post(self, notice: Notification) -> None:
        # To the node's mailbox: another thread takes it from there.
        self.process.later(0.0, self._deliver, notice)

    @property
    def lease(self) -> float:
        """See `Link.lease`."""
        return self._server.dispatcher.settings.lease

    @property
    def confirmed_at(self) -> float:
        """See `Link.confirmed_at`."""
        return self.process.monotonic()

    def send(self, request: Request) -> None:
        """Say something to the coordinator."""
        self._server.dispatcher.receive(self.number, request)

    def close(self) -> None:
        """End the session."""
        self._server.dispatcher.detach(self.number, Reason.DEPARTED)

    def finish(self) -> None:
        """Nothing is under way here."""

    def abort(self) -> None:
        """It ends with its process."""
