"""Connections between nodes and control servers: they delay, hold back and break, and never reorder.

A connection is two directions, each first in, first out. Data that arrives while its node is cut off waits, like TCP's
retransmissions, and arrives when the cut heals. A reset loses the data under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Protocol

from tests.sim.world import Call, Process, World


class Side(Protocol):
    """Who sits at one end of a connection."""

    process: Process

    def on_bytes(self, connection: Connection, payload: bytes) -> None:
        """One frame has come."""
        ...

    def on_end(self, connection: Connection, *, reset: bool) -> None:
        """The other side has disconnected, or the connection is broken."""
        ...


class Listener(Protocol):
    """Whoever listens at the endpoint."""

    process: Process

    def on_connect(self, connection: Connection) -> Side:
        """A connection has come in."""
        ...


class End:
    """One end of a connection, from the kernel's point of view."""

    __slots__ = ("arrived_at", "blackhole", "last", "open", "over", "side")

    def __init__(self, side: Side | None) -> None:
        self.side = side
        self.open = True
        """Whether this side may still send."""
        self.over = False
        """Whether this side knows that nothing more comes."""
        self.last = 0.0
        self.arrived_at = 0.0
        self.blackhole = False


class Connection:
    """One TCP connection; end 0 is the node's, end 1 the server's."""

    def __init__(self, network: Network, node: int, host: int | None, rng: Random) -> None:
        self.network = network
        self.world = network.world
        self.node = node
        self.host = host
        """The node on which the server is, where that was elected."""
        self.rng = rng
        self.ends = (End(None), End(None))
        self._stalled: deque[tuple[Call, tuple[Any, ...]]] | None = None

    @property
    def is_acknowledged(self) -> bool:
        """Whether the server's kernel receives what the node sends, also while its process is paused."""
        server = self.ends[1]
        alive = server.side is not None and server.side.process.alive and not server.blackhole
        return alive and self._stalled is None and self.network.cut_between(self.node, self.host) is None

    def send(self, end: int, payload: bytes) -> None:
        """Send a frame from `end` to the other."""
        if self.ends[end].open:
            self._move(1 - end, self._arrive, payload)

    def close(self, end: int) -> None:
        """Say that nothing more comes: what was sent still arrives, then the end of it."""
        if self.ends[end].open:
            self.ends[end].open = False
            self._move(1 - end, self._finish, False)

    def abort(self, end: int) -> None:
        """Disconnect at once: what is under way in either direction is lost."""
        if self.ends[end].open:
            self.ends[end].open = False
            self.ends[1 - end].blackhole = True
            self._move(1 - end, self._finish, True)

    def reset(self) -> None:
        """Something between the two breaks the connection: both learn of it."""
        for end in (0, 1):
            self.ends[end].blackhole = True
            self._move(end, self._finish, True)

    def reset_at_node(self) -> None:
        """Something between the two forgets the connection: only the node learns of it, the server hears no more."""
        for end in (0, 1):
            self.ends[end].blackhole = True
        self._move(0, self._finish, True)

    # Inside

    def _move(self, to: int, call: Call, *args: Any) -> None:
        end = self.ends[to]
        at = max(end.last, self.world.now + self.network.delay(self.rng))
        end.last = at
        self.world.at(at, self._reach, to, call, args)

    def _reach(self, to: int, call: Call, args: tuple[Any, ...]) -> None:
        if self._stalled is not None:
            self._stalled.append((call, (to, *args)))
        elif (cut := self.network.cut_between(self.node, self.host)) is not None:
            self._stalled = deque([(call, (to, *args))])
            self.network.when_healed(cut, self._thaw)
        else:
            call(to, *args)

    def _thaw(self) -> None:
        """The cut is over: what was held back is sent again, sooner or later."""
        delay = self.rng.choice([0.0, 0.1, 1.0]) * self.rng.random()
        self.network.on_stall(self.node, delay)
        self.world.after(delay, self._flush)

    def _flush(self) -> None:
        cut = self.network.cut_between(self.node, self.host)
        if cut is not None:
            self.network.when_healed(cut, self._thaw)
            return
        stalled, self._stalled = self._stalled, None
        for call, args in stalled or ():
            call(*args)

    def _arrive(self, to: int, payload: bytes) -> None:
        end = self.ends[to]
        if end.blackhole or end.side is None:
            return
        process = end.side.process
        if not process.alive:
            if not self.network.silent(process):
                self._move(1 - to, self._finish, True)
            return
        end.arrived_at = self.world.now
        process.hears(end.side.on_bytes, self, payload)

    def _finish(self, to: int, reset: bool) -> None:
        end = self.ends[to]
        if not end.over and end.side is not None:
            end.side.process.hears(self._ended, end, reset)

    def _ended(self, end: End, reset: bool) -> None:
        if not end.over and end.side is not None:
            end.over = True
            end.open = end.open and not reset
            end.side.on_end(self, reset=reset)


class Network:
    """Who can reach whom, and how fast."""

    def __init__(self, world: World, *, delay: float) -> None:
        self.world = world
        self.listener: Listener | None = None
        """Who listens at the endpoint."""
        self._ports: list[tuple[int, Listener]] = []
        """Those of elected servers, and the nodes that they are on."""
        self._connections: list[Connection] = []
        self._open: set[int] = set()
        self.endpoint_silent = False
        self.on_stall: Callable[[int, float], None] = _nothing
        """Told of a node whose connection takes so many seconds more after a cut."""
        self._delay = delay
        self._cuts: dict[int, int] = {}
        self._waiting: dict[int, list[Callable[[], None]]] = {}
        self._silent: set[str] = set()

    def delay(self, rng: Random) -> float:
        """How long the next frame is under way: mostly short, seldom long."""
        draw = rng.random()
        return self._delay * (0.2 + draw) if draw < 0.95 else self._delay * (20 * draw)

    def listen(self, listener: Listener, host: int | None = None) -> int:
        """Listen at the endpoint, or on a port of a node; returns the port."""
        if host is None:
            self.listener = listener
            return 0
        self._ports.append((host, listener))
        self._open.add(len(self._ports))
        return len(self._ports)

    def listen_no_more(self, listener: Listener) -> None:
        """Whoever connects there from now on is refused."""
        if self.listener is listener:
            self.listener = None
        self._open -= {port for port, (_, each) in enumerate(self._ports, 1) if each is listener}

    def disconnect_all(self, process: Process) -> None:
        """End all connections of a killed server, as its kernel does. A node whose greeting waited there tries again:

        1. The server is paused; a node connects, and its kernel takes the greeting.
        2. The server is killed, and another one begins.
        3. Were only sessions ended, the node would wait for the first server's answer, and count as lost at the second.
        """
        for connection in self._connections:
            side = connection.ends[1].side
            if side is not None and side.process is process:
                connection.abort(1)

    def connect(self, side: Side, node: int, rng: Random, done: Call, port: int = 0) -> None:
        """Ask for a connection; `done` is called at the node with it, or with None if it is refused. Or never."""
        self.world.after(self.delay(rng), self._syn, side, node, rng, done, port)

    def _syn(self, side: Side, node: int, rng: Random, done: Call, port: int) -> None:
        host, listener = self._ports[port - 1] if port else (None, self.listener)
        cut = self.cut_between(node, host)
        if cut is not None:
            self.when_healed(cut, lambda: self._syn(side, node, rng, done, port))
            return
        if listener is None or not listener.process.alive or (port and port not in self._open):
            silent = self.silent(listener.process) if port and listener is not None else self.endpoint_silent
            if not silent:
                self.world.after(self.delay(rng), side.process.hears, done, None)
            return
        connection = Connection(self, node, host, rng)
        self._connections.append(connection)
        connection.ends[0].side = side
        connection.ends[1].side = listener.on_connect(connection)
        connection.ends[1].arrived_at = self.world.now
        self.world.after(self.delay(rng), side.process.hears, done, connection)

    # Cuts

    def cut(self, node: int) -> None:
        """From now on nothing passes between the node and the server."""
        self._cuts[node] = self._cuts.get(node, 0) + 1

    def heal(self, node: int) -> None:
        """The cut is over: what was held back arrives."""
        self._cuts[node] -= 1
        if not self._cuts[node]:
            del self._cuts[node]
            for call in self._waiting.pop(node, ()):
                call()

    def when_healed(self, node: int, call: Callable[[], None]) -> None:
        """Have something done when the node is no longer cut off."""
        self._waiting.setdefault(node, []).append(call)

    def is_cut(self, node: int) -> bool:
        """Whether the node is cut off."""
        return node in self._cuts

    def cut_between(self, node: int, host: int | None) -> int | None:
        """Who is cut off, if the two cannot reach each other. A host of None is the endpoint's, which is never cut."""
        if node in self._cuts and node != host:
            return node
        return host if host in self._cuts and node != host else None

    def fall_silent(self, process: Process) -> None:
        """The process's machine has lost its power: nobody answers there, not even a kernel."""
        self._silent.add(process.name)

    def silent(self, process: Process) -> bool:
        """Whether the process's machine is without power."""
        return process.name in self._silent


def _nothing(_node: int, _seconds: float) -> None:
    return None
