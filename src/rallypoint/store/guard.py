"""Limits who may connect to a store, and how much of it each connection may use. Pure.

Torch's clients cannot prove who they are, so any client can read and write all keys: what guards a store is the address
that a client comes from. The limits bound what one connection can take from the process that serves; what
goes beyond them ends that connection with a log line, and no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from socket import AF_INET, AF_INET6, inet_pton
from typing import NamedTuple

from rallypoint.base.errors import UserError

_IPV4_MAPPED = bytes(10) + b"\xff\xff"
"""Before an IPv4 address this is how a socket for both kinds shows it."""


class StoreGuard(NamedTuple):
    """What a store grants. Bytes count keys and values alike."""

    peers: Sequence[str] | None = None
    """Addresses and networks (`10.0.0.0/8`) that may connect; None for all. `StoreThread.set_peers` changes it."""
    own_user: bool = False
    """Whether connections of other users of this machine are refused (`base.peer_user`); root's are not."""
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
    """A numeric address in the form of IPv6, without the scope that a link-local one may have.

    Raises:
        OSError: it is no address.
    """
    return inet_pton(AF_INET6, text.partition("%")[0]) if ":" in text else _IPV4_MAPPED + inet_pton(AF_INET, text)


def shown_peers(allowed: Sequence[str] | None) -> str:
    """Who may connect, for a sentence; not all of a thousand."""
    allowed = allowed or ()
    few = ", ".join(allowed[:4]) + (f" and {len(allowed) - 4} more" if len(allowed) > 4 else "")
    return few or "there are none"
