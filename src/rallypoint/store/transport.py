"""Chooses which of the two stores serves, and defines what they have in common.

The store is there twice: in Python (`polling` over `serving`, `decoder` and `table`), and in C (`native/`, behind
`compiled`) where a compiler was there at installation. Both keep the laws that the Python files state, and the same
tests hold both to them. `RALLYPOINT_STORE=python` has the Python one serve although there is the other.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Protocol

from rallypoint.base.log import get_logger
from rallypoint.store.transport_context import TransportContext

_logger = get_logger(__name__)

STORE_VARIABLE = "RALLYPOINT_STORE"


class StoreTransport(Protocol):
    """A store and the connections to it. One thread uses it."""

    def serve(self) -> None:
        """Serve until the wake-up descriptor is written to."""

    def run_once(self) -> bool:
        """Do some of what there is to do, without waiting; whether there was anything."""

    def add_connection(self, client: socket.socket, data: bytes = b"") -> None:
        """Serve a socket that is connected already, and from which this has been read."""

    def set_peers(self, peers: Sequence[str] | None) -> None:
        """From now on only these addresses and networks may be connected; others are disconnected. None: all may."""

    def close(self) -> None:
        """End all connections. The listening socket is not closed."""

    def release_memory(self) -> None:
        """After `close`: give the memory back, which takes a while if there are many keys."""


def open_transport(context: TransportContext) -> StoreTransport:
    """A new store that serves what the context says."""
    name = "a shared port" if context.listener is None else f"port {context.listener.getsockname()[1]}"
    reason = f"{STORE_VARIABLE}=python"
    if os.environ.get(STORE_VARIABLE) != "python":
        try:
            from rallypoint.store.compiled import CompiledTransport
        except ImportError as error:
            reason = f"the one in C is not available: {error}"
        else:
            _logger.debug("the store on %s is served by the one in C", name)
            return CompiledTransport(context)
    _logger.debug("the store on %s is served by the one in Python (%s)", name, reason)

    from rallypoint.store.polling import PollingTransport

    return PollingTransport(context)
