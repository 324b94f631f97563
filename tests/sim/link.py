"""A node's connection to the control server: `control.client.tcp_link` in virtual time, without TCP.

The handshake, the codec and the messages that are kept and repeated are the production ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from random import Random

from rallypoint.control.client.dialing import DialTarget, patience
from rallypoint.control.election.leader_resolver import LeaderResolver
from rallypoint.control.membership.state import NodeId, Settings
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.handshake import Challenge, ClientHandshake, HandshakeError, Welcome
from rallypoint.control.protocol.messages import (
    Heartbeat,
    LeaveRequest,
    LinkDown,
    LinkLost,
    LinkOpened,
    LinkUp,
    Notification,
    ProgressRequest,
    Request,
)
from rallypoint.control.protocol.resume_state import (
    ResumeState,
    after_notification,
    after_request,
    give_up_at,
    requests_to_repeat,
    without_foreign_join,
)
from rallypoint.control.protocol.signing import transcript_of
from tests.sim.network import Connection, Network
from tests.sim.world import Process, Timer, Violation

_FIRST_DELAY, _LONGEST_DELAY = 0.05, 1.0
_CONNECT_FIRST, _CONNECT_AGAIN = 5.0, 1.5
_SILENT_AFTER = 3.0
_SILENT_LEASES, _BUSY_LEASES = 1.5, 4.0
_HEARTBEAT = codec.encode(Heartbeat())


class SimLink:
    """One node's sessions, one after another."""

    def __init__(
        self,
        process: Process,
        network: Network,
        node: int,
        own: NodeId,
        settings: Settings,
        rng: Random,
        deliver: Callable[[Notification], None],
        stand_in: Callable[[], None],
        where: LeaderResolver | None = None,
    ) -> None:
        self.process = process
        self.node = node
        self.source = -1
        """The number of the server that was last talked to."""
        self.connection: Connection | None = None
        self._network = network
        self._address = own.addr
        self._own = own
        self._settings = settings
        self._rng = rng
        self._deliver = deliver
        self._stand_in = stand_in
        self._where = where
        """What knows where the elected server is; None where there is an endpoint."""
        self._place: DialTarget | None = None
        self._moved = False
        self._pause: Timer | None = None
        self._held = ResumeState()
        self._open = False
        self.address: str | None = None
        """See `Link.address`."""
        self._closed = False
        self._ever = False
        self._embedded = True
        self._delay = _FIRST_DELAY
        self._patient_from = process.monotonic()
        self._waits_since: float | None = None
        self._silent: list[Connection] = []
        """Connections that are kept until the server has spoken in the next one."""
        self._attempts = 0
        self._handshaking = True
        self._hello = b""
        self._lease, self._interval = settings.lease, settings.lease / 3
        self._heard_at = 0.0
        self._heartbeats: deque[float] = deque()
        self.confirmed_at = -math.inf
        """See `Link.confirmed_at`."""
        self._timeout: Timer | None = None
        self._handshake = ClientHandshake(settings.run_id, None, b"node", settings)
        if where is not None:
            where.on_move = self._follow_soon
        self._attempt()

    @property
    def is_open(self) -> bool:
        """Whether there is a session."""
        return self._open

    @property
    def lease(self) -> float:
        """See `Link.lease`."""
        return self._lease

    def send(self, request: Request) -> None:
        """Say something, now or as soon as a session is open."""
        self._hold(after_request(self._held, request, self.process.monotonic()))
        if self._open and self.connection is not None:
            self.process.world.note(self.process, "says %s", request)
            self._write(self.connection, codec.encode(request))
        elif not isinstance(request, ProgressRequest):
            self.process.world.note(self.process, "holds %s", request)

    def _hold(self, held: ResumeState) -> None:
        if held.needs_coordinator != self._held.needs_coordinator:
            self._waits_since = self.process.monotonic() if held.needs_coordinator else None
        self._held = held

    def close(self) -> None:
        """Leave and disconnect. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self.connection is not None:
            if self._open:
                self._write(self.connection, codec.encode(LeaveRequest()))
            self.connection.close(0)
        while self._silent:
            self._silent.pop().close(0)
        self._open = False

    def _write(self, connection: Connection, payload: bytes) -> None:
        signers = self._handshake.signers
        connection.send(0, payload if signers is None else signers.outgoing.sign(payload))

    # Dialing

    def _remaining(self) -> float:
        """Seconds left to try: the join timeout for the first session; another one is needed only by who waits."""
        until = self._patient_from + self._settings.join_timeout
        if self._ever:
            since = max(self._patient_from, self._waits_since or 0.0)
            until = give_up_at(self._held, since, self._settings)
        return until - self.process.monotonic()

    def _attempt(self) -> None:
        if self._closed:
            return
        if self._embedded:
            self._stand_in()
        self._attempts += 1
        self._pause, self._moved = None, False
        port = 0
        if self._where is not None:
            try:
                self._place = self._where.resolve()
            except HandshakeError as error:
                raise Violation("a node gives up what is in etcd", str(error)) from None
            if self._place is None:
                self._failed(self._attempts)
                return
            port = self._place.endpoint.port
            self._handshake = ClientHandshake(self._settings.run_id, self._place.key, b"node", self._settings)
        timeout = _CONNECT_AGAIN if self._ever else _CONNECT_FIRST
        self._wait(min(timeout, max(0.1, self._remaining())), self._failed, self._attempts)
        self._network.connect(self, self.node, self._rng, self._connected(self._attempts), port)

    def _follow_soon(self) -> None:
        self.process.later(0.0, self._follow)

    def _follow(self) -> None:
        """The coordinator may be elsewhere by now."""
        if self._closed or self._where is None:
            return
        self._moved = True
        if self._pause is not None:
            self._pause.cancel()
            self._attempt()
        elif self._where.resolve() != self._place:
            if self._open and self.connection is not None:
                self._lose(self.connection, "the coordinator is elsewhere")
            else:
                self._failed(self._attempts)

    def _connected(self, attempt: int) -> Callable[[Connection | None], None]:
        def done(connection: Connection | None) -> None:
            if self._closed or attempt != self._attempts or self.connection is not None:
                if connection is not None:
                    connection.close(0)
            elif connection is None:
                self._failed(attempt, refused=True)
            else:
                self.connection = connection
                self._handshaking = True
                self._wait(min(_SILENT_AFTER, max(0.1, self._remaining())), self._not_answered, attempt)
                hello = self._handshake.hello(self._address, self._own, self._held.opened)
                self._hello = codec.encode(hello)
                connection.send(0, self._hello)

        return done

    def _not_answered(self, attempt: int) -> None:
        """The server has not answered the greeting: it may be busy."""
        if attempt == self._attempts and self.connection is not None and self.connection.is_acknowledged:
            self._wait(min(patience(self._settings), max(0.1, self._remaining())), self._failed, attempt)
        else:
            self._failed(attempt)

    def _failed(self, attempt: int, *, refused: bool = False) -> None:
        """The attempt has come to nothing: disconnect, and try again a little later or give up."""
        if self._closed or self._open or attempt != self._attempts:
            return
        self._attempts += 1
        self._stop_waiting()
        if self.connection is not None:
            self.connection.close(0)
            self.connection = None
        if self._where is not None and self._place is not None:
            self._where.on_failure(self._place, ConnectionRefusedError("") if refused else TimeoutError(""))
        remaining = self._remaining()
        if remaining <= 0:
            self._closed = True
            self._deliver(LinkLost("the control plane stayed away"))
            return
        pause = 0.0 if self._moved else min(self._delay * self._rng.uniform(0.5, 1.0), remaining)
        self._pause = self.process.later(pause, self._attempt)
        self._delay = min(self._delay * 1.5, _LONGEST_DELAY)

    def _wait(self, seconds: float, call: Callable[..., None], *args: object) -> None:
        self._stop_waiting()
        self._timeout = self.process.later(seconds, call, *args)

    def _stop_waiting(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None

    # In a session

    def on_bytes(self, connection: Connection, payload: bytes) -> None:
        """One frame has come."""
        if connection is not self.connection or self._closed:
            return
        self._heard_at = self.process.monotonic()
        if self._handshake.signers is not None:
            payload = self._handshake.signers.incoming.verify(payload)
        if not self._open:
            self._greet(connection, payload)
            return
        while self._silent:
            self._silent.pop().close(0)
        notice = codec.decode_notification(payload)
        self._hold(after_notification(self._held, notice, self.process.monotonic()))
        if not isinstance(notice, Heartbeat):
            self._deliver(notice)
            return
        for _ in range(min(notice.number, len(self._heartbeats))):
            self.confirmed_at = self._heartbeats.popleft()

    def _greet(self, connection: Connection, payload: bytes) -> None:
        answer = codec.decode_answer(payload)
        if self._handshaking and self._handshake.key is not None:
            assert isinstance(answer, Challenge), answer
            self._handshaking = False
            connection.send(0, codec.encode(self._handshake.prove(transcript_of(self._hello, payload))))
            return
        assert isinstance(answer, Welcome), answer
        self._stop_waiting()
        self._open = True
        self._delay = _FIRST_DELAY
        self._lease, self._interval = answer.lease, answer.heartbeat_interval or answer.lease / 3
        self._embedded = answer.embedded
        self.source = int(answer.incarnation.rpartition("-")[2])
        if self._ever:
            before = self._held
            self._hold(without_foreign_join(before, answer.incarnation))
            self._deliver(LinkUp(join_lost=before.join is not self._held.join))
        self._ever = True
        again = requests_to_repeat(self._held, self.process.monotonic())
        self._hold(self._held._replace(opened=answer.incarnation))
        if self._where is not None:
            self._where.session_opened(answer.incarnation)
        self.process.world.note(self.process, "is in a session with %s", answer.incarnation)
        for request in again:
            self.process.world.note(self.process, "says again %s", request)
            self._write(connection, codec.encode(request))
        self._check_silence(connection)
        if self.address is None:
            self.address = self._address
            self._deliver(LinkOpened())
        self._heartbeats.clear()
        self.process.later(self._interval, self._send_heartbeat, connection)

    def _check_silence(self, connection: Connection) -> None:
        """Look whether the server has been silent for too long, and look again when it could have been."""
        if connection is not self.connection:
            return
        silent = self.process.monotonic() - self._heard_at
        busy = silent >= _SILENT_LEASES * self._lease and connection.is_acknowledged
        timeout = (self._rng.uniform(_BUSY_LEASES - 1.0, _BUSY_LEASES) if busy else _SILENT_LEASES) * self._lease
        if silent >= timeout:
            self._silent.append(connection)
            self._lose(connection, "silent for too long")
        else:
            self.process.later(timeout - silent + 1e-6, self._check_silence, connection)

    def _send_heartbeat(self, connection: Connection) -> None:
        if connection is self.connection and self._open:
            self.process.later(self._interval, self._send_heartbeat, connection)
            self._heartbeats.append(self.process.monotonic())
            self._write(connection, _HEARTBEAT)

    def on_end(self, connection: Connection, *, reset: bool) -> None:
        """The server has disconnected, or the connection is broken."""
        if connection is self.connection and not self._closed:
            if self._open:
                self._lose(connection, "reset" if reset else "the server closed the connection")
            else:
                self._failed(self._attempts)

    def _lose(self, connection: Connection, why: str) -> None:
        if connection not in self._silent:
            connection.close(0)
        self.connection = None
        self._open = False
        self._patient_from = self.process.monotonic()
        self.process.world.note(self.process, "has lost its link: %s", why)
        if self._held.ended or self._held.refused:
            self._closed = True
            return
        self._deliver(LinkDown(why))
        self._attempt()
