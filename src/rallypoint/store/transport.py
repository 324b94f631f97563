"""The parts shared by the two stores (`server` selects one), and the limits on their clients.

The store exists twice: in plain Python (`plain`) and, if a compiler was available at installation, in C (`native/`,
behind `compiled`). Both follow the laws in `plain`, and the same tests check both.

torch's clients cannot prove their identity, so any client can read and write all keys: only a client's address guards
the store. The limits bound one connection's resources; exceeding them ends only that connection, with a log line.
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
from rallypoint.base.log import RateLimitedLog, get_logger
from rallypoint.store.errors import StoreProtocolError

_log = get_logger(__name__)

_IPV4_MAPPED = bytes(10) + b"\xff\xff"
"""The prefix of an IPv4 address on a dual-stack socket."""


class StoreGuard(NamedTuple):
    """The permissions and limits of a store. Bytes count both keys and values."""

    peers: Sequence[str] | None = None
    """Addresses and networks (`10.0.0.0/8`) that may connect; None for all. `StoreThread.set_peers` changes it."""
    own_user: bool = False
    """Whether to refuse other users of this machine except root (`base.netlink`)."""
    validate_timeout: float = 30.0
    """Seconds in which a connection must send its greeting; 0 for no limit."""
    keepalive: tuple[int, int, int] = (120, 30, 6)
    """Seconds of silence before the kernel probes a client's machine, seconds between later probes, and the number of
    unanswered probes that end the connection."""
    connections: int = 0
    """Maximum number of connections at once; others wait. 0 for as many as there are descriptors."""
    request: int = 32 * 1024 * 1024
    """Maximum size of a request, which is stored until it is complete."""
    value: int = 32 * 1024 * 1024
    """Maximum size of a value, including APPEND."""
    keys: int = 1 << 24
    """Maximum keys by which one connection can enlarge the store; its deletions are deducted. Only in C."""
    bytes: int = 1 << 33
    """Maximum bytes by which one connection can enlarge the store; each key and each value in a queue costs 64 more.
    Only in C."""


SINGLE_ADDRESS_BITS = 128
"""Bits of a network that is a single address."""


class Network(NamedTuple):
    """The addresses that share this many first bits, in the form of IPv6."""

    address: bytes
    bits: int

    def __contains__(self, address: object) -> bool:
        assert isinstance(address, bytes)
        shift = 128 - self.bits
        return int.from_bytes(address, "big") >> shift == int.from_bytes(self.address, "big") >> shift


def network(text: str) -> Network:
    """Parse an address, or a network as `address/bits`. Raises UserError if it is neither."""
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
            f"{text!r} is neither an address nor a network; use a form such as 10.1.2.3, 10.0.0.0/8, fd00::1 or "
            "fd00::/64"
        ) from None
    return Network(packed, count + 128 - most)


def networks(texts: Iterable[str] | None) -> tuple[Network, ...] | None:
    return None if texts is None else tuple(map(network, texts))


def packed_address(text: str) -> bytes:
    """Pack a numeric address in IPv6 form, without a link-local scope. Raises OSError if it is not an address."""
    return inet_pton(AF_INET6, text.partition("%")[0]) if ":" in text else _IPV4_MAPPED + inet_pton(AF_INET, text)


def shown_peers(allowed: Sequence[str] | None) -> str:
    """The allowed peers, abbreviated, for a sentence."""
    allowed = allowed or ()
    few = ", ".join(allowed[:4]) + (f" and {len(allowed) - 4} more" if len(allowed) > 4 else "")
    return few or "there are none"


ACCEPT_RETRY = 1.0
"""Seconds without new connections after resources for one ran out."""


class TransportContext(NamedTuple):
    """What a store's thread provides."""

    listener: socket.socket | None
    """A listening socket; queued clients are served first. None: connections come only from `add_connection`."""
    wakeup_fd: int
    """Descriptor of a `base.kernel.Wakeup` that makes `StoreTransport.serve` return. `serve` clears it."""
    log_lines: RateLimitedLog
    """For all log lines that unauthenticated peers can cause."""
    guard: StoreGuard = StoreGuard()
    """Limits peers and their resources."""
    retry: float = ACCEPT_RETRY
    """Seconds without new connections after resources for one ran out."""


class StoreTransport(Protocol):
    """A store and the connections to it. One thread uses it."""

    def serve(self) -> None:
        """Serve until the wake-up descriptor is written to."""

    def run_once(self) -> bool:
        """Do some of the pending work without waiting. Returns whether there was any."""

    def add_connection(self, client: socket.socket, data: bytes = b"") -> None:
        """Serve a connected socket from which `data` was already read."""

    def set_peers(self, peers: Sequence[str] | None) -> None:
        """Permit only these addresses and networks (None: all), and disconnect others."""

    def close(self) -> None: ...

    def release_memory(self) -> None:
        """Release the memory after `close`. This takes a while if there are many keys."""


def set_options(connection: socket.socket, guard: StoreGuard) -> None:
    """Set a connection's options, on itself or on the listening socket from which it inherits them."""
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
    if isinstance(error, StoreProtocolError) and error.is_launcher:
        _log.debug("an agent or rallyctl at %s asked whether the store is a control plane", peer)
        return
    lines.warning("the store is closing the connection from %s: %s", peer, error)


NO_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC}
"""Errors that mean that a connection is impossible now but perhaps not later."""


def raise_descriptor_limit(context: TransportContext, error: int, present: int) -> int:
    """Raise the limit if a lack of descriptors prevents new connections, otherwise log the error.

    `error` is 0 if the number of connections has reached the guard's limit; `present` is the first descriptor reserved
    for other uses. Returns its new value; if that differs, a connection can be accepted at once.
    """
    if not error:
        context.log_lines.warning(
            "the store will not accept more connections until others close: it has reached its maximum of %d",
            context.guard.connections,
        )
        return present
    reason = os.strerror(error)
    if error == errno.EMFILE:
        soft = limits()[0]
        limit = allow_descriptors()
        if soft not in {limit, resource.RLIM_INFINITY}:
            return for_connections(limit)
        reason = f"{reason} (some of the {limit} are reserved for the agent); raise the hard limit (`ulimit -Hn`)"
    context.log_lines.warning("the store will not accept connections for %g s: %s", context.retry, reason)
    return present
