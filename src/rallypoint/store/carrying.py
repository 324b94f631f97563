"""Which of the two stores serves a listening socket, and what both of them say.

The store is there twice: in Python (`polling` over `serving`, `decoder` and `table`), and in C (`native/`, behind
`compiled`) where a compiler was there at installation. Both keep the laws that the Python files state, and the same
tests hold both to them. `RALLYPOINT_STORE=python` has the Python one serve although there is the other.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Protocol, TypeAlias

from rallypoint.base.endpoint import Endpoint
from rallypoint.base.log import get_logger

_logger = get_logger(__name__)

CHOICE = "RALLYPOINT_STORE"
RETRY = 1.0
"""Seconds without new connections when there were no means for one more."""

Later: TypeAlias = Callable[[float, Callable[[], None]], object]
"""Calls a function after so many seconds."""


class Carrier(Protocol):
    """A listening socket, the connections made through it, and the store that they use; all on the loop's thread."""

    def fileno(self) -> int:
        """A descriptor that is readable while there is something to do."""

    def ready(self) -> None:
        """Do what there is to do."""

    def adopt(self, client: socket.socket) -> None:
        """Serve a socket that is connected already."""

    def close(self) -> None:
        """End all connections and stop listening."""


def open_carrier(listener: socket.socket, later: Later) -> Carrier:
    """Serve a new store on a listening socket, which is closed in the end.

    Args:
        listener: it listens; whoever has connected meanwhile is served first.
        later: the loop's `call_later`.
    """
    port = listener.getsockname()[1]
    reason = f"{CHOICE}=python"
    if os.environ.get(CHOICE) != "python":
        try:
            from rallypoint.store.compiled import CompiledSockets
        except ImportError as error:
            reason = f"the one in C cannot be had: {error}"
        else:
            _logger.debug("the store on port %d is served by the one in C", port)
            return CompiledSockets(listener, later)
    _logger.debug("the store on port %d is served by the one in Python (%s)", port, reason)

    from rallypoint.store.polling import PolledSockets
    from rallypoint.store.serving import ServedTable

    return PolledSockets(listener, ServedTable(), later)


def ready_to_listen(listener: socket.socket) -> None:
    """Set on a listening socket what accepted ones inherit."""
    listener.setblocking(False)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def peer_text(address: object) -> str:
    """A socket's peer address as people write it."""
    if not isinstance(address, tuple):
        return "somebody who has gone"
    return str(Endpoint(str(address[0]).removeprefix("::ffff:"), int(address[1])))


def peer_of(client: socket.socket) -> str:
    """Who is at a socket's other end, for messages."""
    try:
        return peer_text(client.getpeername())
    except OSError:
        return peer_text(None)


def log_refusal(peer: str, error: Exception) -> None:
    """Say why a connection is closed."""
    _logger.warning("the store closes the connection from %s: %s", peer, error)


def log_starvation(reason: str) -> None:
    """Say why nobody can connect for a while."""
    _logger.warning("the store accepts no connections for %g s: %s", RETRY, reason)
