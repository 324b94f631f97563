"""The control server's process: the production arbiter and handshake, and a shell as thin as `hub` and `connection`.

It lives in a process of its own, or in that of the node that hosts it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import inf
from typing import TYPE_CHECKING

from rallypoint.rendezvous import codec
from rallypoint.rendezvous.arbiter import Arbiter
from rallypoint.rendezvous.handshake import Challenge, Hello, Proof, Refused, ServerHandshake, Welcome
from rallypoint.rendezvous.messages import Beat, JoinRequest, Leave, Notice, Request
from rallypoint.rendezvous.state import NodeId, Reason, Settings, State
from tests.sim.network import Connection, Network
from tests.sim.world import Process, Timer

if TYPE_CHECKING:
    from tests.sim.audit import Audit

LINGER = 2.0
"""Seconds that nodes have to read the last notices once the server ends."""

_SOON = 1e-4
"""A timer needs some time: with none at all, a moment that is missed by a rounding error never comes."""

_BEAT = codec.encode(Beat())


class WatchedArbiter(Arbiter):
    """The production arbiter, and each state that it has had since it was last looked at."""

    def __init__(self, settings: Settings, incarnation: str) -> None:
        self.history: list[State] = []
        super().__init__(settings, incarnation)

    def present(self) -> Collection[NodeId]:
        """Nodes that have a session."""
        return self.roster.nodes

    @property
    def awaits_some(self) -> bool:
        """Whether it waits for nodes of a running round that it has no session with."""
        return self._all_let_go or self._absent_until is not None

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, State):
            self.history.append(value)
        super().__setattr__(name, value)


class Server:
    """One life of the control server."""

    def __init__(
        self, process: Process, network: Network, settings: Settings, number: int, audit: Audit, home: int
    ) -> None:
        self.process = process
        self.home = home
        self.number = number
        self.incarnation = f"server-{number}"
        self.arbiter = WatchedArbiter(settings, self.incarnation)
        self.audit = audit
        self.sessions: dict[int, Session | LocalSession] = {}
        self.ending = False
        self._strangers: list[Session] = []
        """Connections that have not become sessions, and some that have."""
        self._network = network
        self._settings = settings
        self._numbers = 0
        self._timer: Timer | None = None
        self._timer_at = inf
        network.listener = self

    @property
    def alive(self) -> bool:
        """Whether it runs and takes nodes."""
        return self.process.alive and not self.ending

    def on_connect(self, connection: Connection) -> Session:
        """A connection has come in."""
        stranger = Session(self, connection, self._settings)
        self._strangers.append(stranger)
        return stranger

    def attach(self, holder: Session | LocalSession, hello: Hello, server_address: str, *, leased: bool) -> NodeId:
        """Open a session; returns the name that the node goes by."""
        self._numbers += 1
        self.audit.attached(self, holder.node)
        holder.number = self._numbers
        self.sessions[self._numbers] = holder
        name = self.arbiter.open(
            self._numbers,
            NodeId(hello.address, hello.pid, hello.local_id),
            self.process.clock(),
            address=hello.address,
            server_address=server_address,
            leased=leased,
            at_home=hello.pid == self.home,
        )
        for former in self._ended():
            former.hang_up()
        self._arm()
        return name

    def receive(self, number: int, node: int, request: Request) -> bool:
        """A request of a session. Returns whether the session is still one."""
        known = self.arbiter.has_session(number)
        if known and not isinstance(request, Beat):
            self.audit.hears(self, node, request)
        sends = self.arbiter.receive(number, request, self.process.clock())
        for holder in self._ended():
            holder.hang_up()
        self.audit.after(self, node, request)
        self._deliver(sends)
        return known

    def detach(self, number: int, reason: Reason) -> None:
        """A session has ended."""
        self.sessions.pop(number, None)
        sends = self.arbiter.close(number, self.process.clock(), reason)
        self.audit.after(self, None, None)
        self._deliver(sends)

    def finish(self, done: Callable[[], None]) -> None:
        """End in order: take no more nodes, let the last notices arrive; `done` when that is over."""
        self.ending = True
        if self._network.listener is self:
            self._network.listener = None
        for holder in (*self.sessions.values(), *self._strangers):
            holder.finish()
        self._await_goodbyes(self.process.clock() + LINGER, done)

    def _await_goodbyes(self, until: float, done: Callable[[], None]) -> None:
        if self.sessions and self.process.clock() < until:
            self.process.later(0.1, self._await_goodbyes, until, done)
            return
        for holder in list(self.sessions.values()):
            holder.hang_up()
        done()

    # Inside

    def _tick(self) -> None:
        self._timer, self._timer_at = None, inf
        sends = self.arbiter.tick(self.process.clock())
        for holder in self._ended():
            self.audit.found_silent(self, holder)
            holder.hang_up()
        self.audit.after(self, None, None)
        self._deliver(sends)

    def _ended(self) -> list[Session | LocalSession]:
        numbers = self.arbiter.take_ended()
        return [self.sessions.pop(number) for number in numbers if number in self.sessions]

    def _deliver(self, sends: list[tuple[int, Notice]]) -> None:
        for number, notice in sends:
            holder = self.sessions.get(number)
            if holder is not None:
                holder.deliver(notice)
        self._arm()

    def _arm(self) -> None:
        at = self.arbiter.wake_at()
        if at == self._timer_at or self.ending:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = at
        if at < inf:
            self._timer = self.process.later(max(_SOON, at - self.process.clock()), self._tick)


class Session:
    """One connection, seen from the server: greeting, handshake, session."""

    def __init__(self, server: Server, connection: Connection, settings: Settings) -> None:
        self.process = server.process
        self.node = connection.node
        self.connection = connection
        self.number = 0
        self._server = server
        self._lease = settings.lease
        self._handshake = ServerHandshake(settings.run_id, None, b"server")
        self._leaving = False
        self._done = False

    def on_bytes(self, connection: Connection, payload: bytes) -> None:
        """One frame has come."""
        if self._done:
            return
        if self.number:
            self._on_request(_BEAT_REQUEST if payload == _BEAT else codec.decode_request(payload))
        elif self._handshake.greeted is None:
            answer = self._handshake.hello(codec.decode(payload, Hello))
            assert isinstance(answer, Challenge), answer
            connection.send(1, codec.encode(answer))
        else:
            refused = self._handshake.proof(codec.decode(payload, Proof))
            assert not isinstance(refused, Refused), refused
            greeted = self._handshake.greeted
            assert greeted is not None
            name = self._server.attach(self, greeted, "10.0.0.254", leased=True)
            welcome = Welcome(name, self._lease, self._server.incarnation, self._server.home >= 0)
            connection.send(1, codec.encode(welcome))

    def _on_request(self, request: Request) -> None:
        if isinstance(request, Leave):
            self._leaving = True
        elif isinstance(request, JoinRequest):
            self._leaving = False
        if not self._server.receive(self.number, self.node, request):
            self._done = True
            self.connection.close(1)

    def on_end(self, connection: Connection, *, reset: bool) -> None:
        """The node has hung up, or the connection is broken."""
        self.process.world.note(self.process, "loses node %d, %s", self.node, "reset" if reset else "hung up")
        connection.close(1)
        self._detach()

    def deliver(self, notice: Notice) -> None:
        """Send the node a notice."""
        if isinstance(notice, Beat):
            self.connection.send(1, _BEAT)
            return
        self.process.world.note(self.process, "to node %d: %s", self.node, notice)
        self.connection.send(1, codec.encode(notice))

    def finish(self) -> None:
        """Send what is left and say that nothing more comes; take no more requests."""
        self._done = True
        self.connection.close(1)

    def hang_up(self) -> None:
        """Hang up at once."""
        self.process.world.note(self.process, "hangs up on node %d", self.node)
        self.connection.abort(1)
        self._detach()

    def break_off(self) -> None:
        """Its process is killed; the kernel ends the connection."""
        self.connection.abort(1)

    def _detach(self) -> None:
        self._done = True
        if self.number:
            number, self.number = self.number, 0
            self._server.detach(number, Reason.DEPARTED if self._leaving else Reason.LOST)


_BEAT_REQUEST = Beat()


class LocalSession:
    """The session of the node that hosts the server: no connection, no lease."""

    def __init__(self, server: Server, node: int, deliver: Callable[[Notice], None]) -> None:
        self.node = node
        self.number = 0
        self.process = server.process
        self._server = server
        self._deliver = deliver

    def deliver(self, notice: Notice) -> None:
        """Hand the notice to the node's mailbox: another thread takes it from there."""
        if not isinstance(notice, Beat):
            self.process.later(0.0, self._deliver, notice)

    def send(self, request: Request) -> None:
        """Say something to the arbiter."""
        self._server.receive(self.number, self.node, request)

    def close(self) -> None:
        """End the session."""
        self._server.detach(self.number, Reason.DEPARTED)

    def finish(self) -> None:
        """Nothing is under way here."""

    def hang_up(self) -> None:
        """It ends with its process."""

    def break_off(self) -> None:
        """It ends with its process."""
