"""Which of the two stores serves, and what both of them say.

The store is there twice: in Python (`polling` over `serving`, `decoder` and `table`), and in C (`native/`, behind
`compiled`) where a compiler was there at installation. Both keep the laws that the Python files state, and the same
tests hold both to them. `RALLYPOINT_STORE=python` has the Python one serve although there is the other.
"""

from __future__ import annotations

import os
import socket
from typing import NamedTuple, Protocol

from rallypoint.base.endpoint import Endpoint
from rallypoint.base.log import LimitedLines, get_logger

_logger = get_logger(__name__)

CHOICE = "RALLYPOINT_STORE"
RETRY = 1.0
"""Seconds without new connections when there were no means for one more."""


class Surroundings(NamedTuple):
    """What a store is given by the thread on which it works."""

    listener: socket.socket | None
    """It listens; whoever has connected meanwhile is served first. None: connections come by `Carrier.adopt` only."""
    wake: int
    """An eventfd, which has `Carrier.serve` return; it is then empty again."""
    lines: LimitedLines
    """For all that strangers can cause to be said."""
    retry: float = RETRY
    """Seconds without new connections when there were no means for one more."""


class Carrier(Protocol):
    """A store and the connections to it. One thread uses it."""

    def serve(self) -> None:
        """Serve until somebody writes to the eventfd."""

    def turn(self) -> bool:
        """Do some of what there is to do, without waiting; whether there was anything."""

    def adopt(self, client: socket.socket, data: bytes = b"") -> None:
        """Serve a socket that is connected already, and from which this has been read."""

    def close(self) -> None:
        """End all connections. The listening socket is not closed."""

    def free(self) -> None:
        """After `close`: give the memory back, which takes a while if there are many keys."""


def open_carrier(around: Surroundings) -> Carrier:
    """A new store that serves where it is told to."""
    name = "a shared port" if around.listener is None else f"port {around.listener.getsockname()[1]}"
    reason = f"{CHOICE}=python"
    if os.environ.get(CHOICE) != "python":
        try:
            from rallypoint.store.compiled import CompiledSockets
        except ImportError as error:
            reason = f"the one in C cannot be had: {error}"
        else:
            _logger.debug("the store on %s is served by the one in C", name)
            return CompiledSockets(around)
    _logger.debug("the store on %s is served by the one in Python (%s)", name, reason)

    from rallypoint.store.polling import PolledSockets

    return PolledSockets(around)


def ready_to_listen(listener: socket.socket) -> None:
    """Set on a listening socket what accepted ones inherit."""
    listener.setblocking(False)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def peer_of(client: socket.socket) -> str:
    """Who is at a socket's other end, for messages."""
    try:
        address = client.getpeername()
    except OSError:
        address = None
    if not isinstance(address, tuple):
        return "somebody who has gone"
    return str(Endpoint(str(address[0]).removeprefix("::ffff:"), int(address[1])))


def say_refusal(lines: LimitedLines, peer: str, error: Exception) -> None:
    """Say why a connection is closed."""
    lines.warning("the store closes the connection from %s: %s", peer, error)


def say_starvation(around: Surroundings, reason: str) -> None:
    """Say why nobody can connect for a while."""
    around.lines.warning("the store accepts no connections for %g s: %s", around.retry, reason)
