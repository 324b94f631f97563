"""What the two stores have in common; `server` chooses which of them serves.

The store is there twice: in plain Python (`plain`), and in C (`native/`, behind `compiled`) where a compiler was there
at installation. Both keep the laws that `plain` states, and the same tests hold both to them.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from rallypoint.base.descriptors import allow_descriptors, for_connections, limits
from rallypoint.base.endpoint import Endpoint
from rallypoint.base.log import RateLimitedLog
from rallypoint.store.guard import StoreGuard

ACCEPT_RETRY = 1.0
"""Seconds without new connections when resources for one more were lacking."""


class TransportContext(NamedTuple):
    """What the thread of a store provides."""

    listener: socket.socket | None
    """It listens; who has connected meanwhile is served first. None: connections come by `add_connection` only."""
    wakeup_fd: int
    """That of a `base.kernel.Wakeup`, which has `StoreTransport.serve` return; it is then empty again."""
    log_lines: RateLimitedLog
    """For all that unauthenticated peers can cause to be logged."""
    guard: StoreGuard = StoreGuard()
    """Limits which peers may connect, and what each may use."""
    retry: float = ACCEPT_RETRY
    """Seconds without new connections when resources for one more were lacking."""


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

    def close(self) -> None: ...

    def release_memory(self) -> None:
        """After `close`: give the memory back, which takes a while if there are many keys."""


def set_options(made: socket.socket, guard: StoreGuard) -> None:
    """Set what a connection needs: on itself, or on a listening socket from which it inherits that."""
    made.setblocking(False)
    if made.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    idle, interval, count = guard.keepalive
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def peer_of(client: socket.socket) -> str:
    """The peer of a socket, for messages."""
    try:
        address = client.getpeername()
    except OSError:
        address = None
    if not isinstance(address, tuple):
        return "a client that has left"
    return str(Endpoint(str(address[0]).removeprefix("::ffff:"), int(address[1])))


def log_refusal(lines: RateLimitedLog, peer: str, error: Exception) -> None:
    lines.warning("the store closes the connection from %s: %s", peer, error)


NO_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC}
"""Why a connection cannot be had now, and perhaps later."""


def raise_descriptor_limit(context: TransportContext, error: int, present: int) -> int:
    """No connection can be accepted: get more descriptors if those are lacking, and else log it.

    `error` is 0 where there are as many connections as the guard allows; `present` is the number from which on
    descriptors were kept for others. Returns what it is now; another one if a connection can be accepted at once.
    """
    if not error:
        context.log_lines.warning(
            "the store accepts no connections before others end: it has %d, and more are not allowed",
            context.guard.connections,
        )
        return present
    reason = os.strerror(error)
    if error == errno.EMFILE:
        soft = limits()[0]
        limit = allow_descriptors()
        if soft not in {limit, resource.RLIM_INFINITY}:
            return for_connections(limit)
        reason = f"{reason} (some of the {limit} are kept for the agent); raise the hard limit (`ulimit -Hn`)"
    context.log_lines.warning("the store accepts no connections for %g s: %s", context.retry, reason)
    return present
