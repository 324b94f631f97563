"""What the two stores have in common (`server` chooses which of them serves), and what limits their clients.

The store is there twice: in plain Python (`plain`), and in C (`native/`, behind `compiled`) where a compiler was there
at installation. Both keep the laws that `plain` states, and the same tests hold both to them.

Torch's clients cannot prove who they are, so any client can read and write all keys: what guards a store is the address
that a client comes from. The limits bound what one connection can take from the process that serves; what
goes beyond them ends that connection with a log line, and no other.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterable, Sequence
from socket import AF_INET, AF_INET6, inet_pton
from typing import NamedTuple, Protocol

from rallypoint.base.descriptors import allow_descriptors, for_connections, limits
from rallypoint.base.endpoint import Endpoint
from rallypoint.base.errors import UserError
from rallypoint.base.log import RateLimitedLog

_IPV4_MAPPED = bytes(10) + b"\xff\xff"
"""Before an IPv4 address this is how a socket for both kinds shows it."""


class StoreGuard(NamedTuple):
    """What a store grants. Bytes count keys and values alike."""

    peers: Sequence[str] | None = None
    """Addresses and networks (`10.0.0.0/8`) that may connect; None for all. `StoreThread.set_peers` changes it."""
    own_user: bool = False
    """Whether connections of other users of this machine are refused (`base.netlink`); root's are not."""
    validate_timeout: float = 30.0
    """Seconds that a connection has to greet; 0 for no limit."""
    keepalive: tuple[int, int, int] = (120, 30, 6)
    """Seconds of silence after which the kernel asks whether a client's machine is there, seconds between further
    questions, and how many without an answer end the connection."""
    connections: int = 0
    """Connections at once, beyond which others wait until one ends; 0 for as many as there are descriptors for."""
    request: int = 32 * 1024 * 1024
    """Bytes of one request, which are held until all have come."""
    value: int = 32 * 1024 * 1024
    """Bytes of one value, to which it may grow by APPEND."""
    keys: int = 1 << 24
    """Keys by which one connection may make the store larger; those that it deletes count for it. In C only."""
    bytes: int = 1 << 33
    """Bytes by which one connection may make the store larger; each key and each value in a queue costs 64 more. In
    C only."""


SINGLE_ADDRESS_BITS = 128
"""Bits of a network that is a single address."""


class Network(NamedTuple):
    """Addresses of which so many first bits are these, all in the form of IPv6."""

    address: bytes
    bits: int

    def __contains__(self, address: object) -> bool:
        assert isinstance(address, bytes)
        shift = 128 - self.bits
        return int.from_bytes(address, "big") >> shift == int.from_bytes(self.address, "big") >> shift


def network(text: str) -> Network:
    """An address, or a network as `address/bits`. Raises UserError if it is neither."""
    address, slash, bits = text.strip().partition("/")
    try:
        if not slash:
            return Network(packed_address(address), SINGLE_ADDRESS_BITS)
        packed = packed_address(address)
        most = 32 if packed.startswith(_IPV4_MAPPED) and ":" not in address else 128
        count = int(bits)
        if not 0 <= count <= most or not bits.isdecimal():
            raise ValueError
    except (OSError, ValueError):
        raise UserError(
            f"{text!r} is neither an address nor a network; write one as 10.1.2.3, 10.0.0.0/8, fd00::1 or fd00::/64"
        ) from None
    return Network(packed, count + 128 - most)


def networks(texts: Iterable[str] | None) -> tuple[Network, ...] | None:
    return None if texts is None else tuple(map(network, texts))


def packed_address(text: str) -> bytes:
    """A numeric address in the form of IPv6, without the scope that a link-local one may have. Raises OSError: it is no
    address.
    """
    return inet_pton(AF_INET6, text.partition("%")[0]) if ":" in text else _IPV4_MAPPED + inet_pton(AF_INET, text)


def shown_peers(allowed: Sequence[str] | None) -> str:
    """Who may connect, for a sentence; not all of a thousand."""
    allowed = allowed or ()
    few = ", ".join(allowed[:4]) + (f" and {len(allowed) - 4} more" if len(allowed) > 4 else "")
    return few or "there are none"


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


def set_options(connection: socket.socket, guard: StoreGuard) -> None:
    """Set what a connection needs: on itself, or on a listening socket from which it inherits that."""
    connection.setblocking(False)
    if connection.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    idle, interval, count = guard.keepalive
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, idle)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, count)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


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
