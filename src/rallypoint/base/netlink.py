"""Network information from the kernel: the addresses of interfaces (rtnetlink(7)), and the user at the other end of a
TCP connection (sock_diag(7)). Imported only when needed.

Laws about peers' users:

1. The kernel looks up the peer's socket by the connection's two addresses. An answer counts only if the socket is
   established and a process has it open: for closing or orphaned sockets, the kernel reports user 0.
2. A socket that the kernel does not find is on another machine or in another network namespace, or its process is gone.
   Callers cannot distinguish these cases, and grant nothing in any of them.
3. Failure to ask the kernel is an error, never an answer.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum, auto
from errno import ENOENT, ENOTCONN

from rallypoint.base.endpoint import is_loopback, unmapped_address
from rallypoint.base.light_typing import NamedTuple, TypeAlias

MAX_ADDRESSES = 256
"""If a machine has more addresses, as a load balancer does, they count as unknown."""

_NEWLINK, _GETLINK, _NEWADDR, _GETADDR = 16, 18, 20, 22
_ERROR, _DONE = 2, 3
_REQUEST_DUMP = 0x301
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ADDRESS = struct.Struct("=BBBBI")  # family, bits of the network, flags, scope, interface
_LINK = struct.Struct("=BxHiII")  # family, kind, interface, flags, mask of the flags
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_IFLA_NAME = 3
_UP, _LOOPBACK = 1, 8
_TEMPORARY = 1
_LINK_SCOPE = 253
_TIMEOUT = 5.0


class Interface(NamedTuple):
    """One network interface and its addresses, except link-local ones of IPv6."""

    name: str
    is_loopback: bool
    addresses: tuple[str, ...]
    temporary: frozenset[str] = frozenset()
    """IPv6 addresses that change by themselves."""


def interfaces() -> list[Interface]:
    """This machine's active interfaces, in the kernel's order. Raises OSError if the kernel cannot list them."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.settimeout(_TIMEOUT)
        links = list(_parse_dump(kernel, _GETLINK, _NEWLINK))
        addresses: dict[int, dict[str, bool]] = {}
        for message in _parse_dump(kernel, _GETADDR, _NEWADDR):
            family, _, flags, scope, interface = _ADDRESS.unpack_from(message)
            attributes = dict(_attributes(message[_ADDRESS.size :]))
            packed = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
            is_ipv6 = family == socket.AF_INET6
            if packed and (family == socket.AF_INET or (is_ipv6 and scope != _LINK_SCOPE)):
                address = socket.inet_ntop(family, packed)
                addresses.setdefault(interface, {})[address] = is_ipv6 and bool(flags & _TEMPORARY)
    result = []
    for message in links:
        _, _, interface, flags, _ = _LINK.unpack_from(message)
        name = dict(_attributes(message[_LINK.size :])).get(_IFLA_NAME, b"").rstrip(b"\0").decode(errors="replace")
        if flags & _UP and name:
            own = addresses.get(interface, {})
            temporary = frozenset(address for address, changes in own.items() if changes)
            result.append(Interface(name, bool(flags & _LOOPBACK), tuple(own), temporary))
    return result


def interface_addresses() -> tuple[str, ...] | None:
    """Addresses from which this machine may connect to others, IPv4 and IPv6, without duplicates; None if unknown.

    Covers all active interfaces, but not loopback and link-local addresses. A temporary IPv6 address is replaced by
    its network.
    """
    try:
        own_interfaces = interfaces()
    except (OSError, struct.error):
        return None
    addresses: dict[str, None] = {}
    for interface in own_interfaces:
        outward = (address for address in interface.addresses if not is_loopback(address))
        addresses.update((f"{address}/64" if address in interface.temporary else address, None) for address in outward)
    return tuple(addresses) if len(addresses) <= MAX_ADDRESSES else None


def _parse_dump(kernel: socket.socket, request: int, answer: int) -> Iterator[bytes]:
    """The kernel's messages in reply to a dump request. Raises OSError if the kernel refuses."""
    kernel.send(_HEADER.pack(_HEADER.size + 8, request, _REQUEST_DUMP, 1, 0) + bytes(8))
    while True:
        data = kernel.recv(65536)
        at = 0
        while at < len(data):
            size, kind, *_ = _HEADER.unpack_from(data, at)
            if kind == _DONE:
                return
            if kind == _ERROR or size < _HEADER.size:
                raise OSError("the kernel does not list its network interfaces")
            if kind == answer:
                yield data[at + _HEADER.size : at + size]
            at += (size + 3) & ~3


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        size, kind = _ATTRIBUTE.unpack_from(data, at)
        if size < _ATTRIBUTE.size:
            return
        yield kind, data[at + _ATTRIBUTE.size : at + size]
        at += (size + 3) & ~3


NOT_HERE = -1
"""Replaces a user id if no process on this machine (in this network namespace) has the other end."""

_SOCK_DIAG, _BY_FAMILY, _REQUEST = 4, 20, 1
_QUERY = struct.Struct("=BBBBI4s16s16sI8s")  # family, protocol, extensions, padding, states, and the socket's id
_PORTS = struct.Struct("!HH")
_ANY_STATE = 0xFFFFFFFF
_ANY_COOKIE = b"\xff" * 8
_FOUND = struct.Struct("=xB62xII")  # inet_diag_msg (linux/inet_diag.h): its state, user and inode
_ESTABLISHED = 1
_MAPPED = bytes(10) + b"\xff\xff"
"""The prefix of an IPv4 address on a dual-stack socket."""


class Peer(Enum):
    OWN_USER = auto()
    """A process on this machine that runs as our own user or root."""
    OTHER_USER = auto()
    """A process on this machine that runs as another user; or a connection here without a process."""
    REMOTE = auto()
    """A process on another machine, or in another network namespace."""
    UNKNOWN = auto()
    """The kernel cannot be asked."""


SocketName: TypeAlias = "tuple[str, int] | tuple[str, int, int, int]"
"""One end of a connection, as a socket names it."""


class _Side(NamedTuple):
    family: int
    address: str
    port: int
    scope: int

    @property
    def packed(self) -> bytes:
        return socket.inet_pton(self.family, self.address)


def _user_of(kernel: _Kernel, peer: _Side, own: _Side) -> int:
    """The user id of the process at the other end; `NOT_HERE` if no process here has it. Raises OSError if the
    kernel cannot be asked.
    """
    global _netlink_works
    try:
        user = _ask(kernel, peer, own)
        # The kernel answers "no such socket" also when it cannot look. Ask for our own socket, which exists.
        _netlink_works = _netlink_works or user != NOT_HERE or _ask(kernel, own, peer) != NOT_HERE
        if _netlink_works:
            return user
    except OSError:
        pass
    return _read_tables(peer, own)


_netlink_works = False
"""Whether netlink has ever found a socket."""


class _Kernel:
    """A netlink socket, opened by the first request. Use it on one thread at a time, and close it."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def ask(self, request: bytes) -> bytes:
        """Ask the kernel. Raises OSError if it does not answer; the next request then opens a new socket."""
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG)
                self._socket.setblocking(False)  # the answer is ready as soon as the request is sent
            self._socket.send(request)
            return self._socket.recv(4096)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class PeerUsers:
    """Finds the users of peers. Use it on one thread only, and close it."""

    def __init__(self) -> None:
        self._own_addresses: frozenset[str] | None = None
        self._kernel = _Kernel()

    def close(self) -> None:
        """Idempotent."""
        self._kernel.close()

    def peer_of(self, connected: socket.socket) -> Peer:
        try:
            return self.peer_between(connected.getsockname(), connected.getpeername())
        except OSError as error:
            return Peer.OTHER_USER if error.errno == ENOTCONN else Peer.UNKNOWN

    def peer_between(self, own_name: SocketName, peer_name: SocketName) -> Peer:
        try:
            own, peer = _parse_side(own_name), _parse_side(peer_name)
            local = is_loopback(own.address) or own.address == peer.address
            if not local and peer.address not in self._addresses_here():
                return Peer.REMOTE
            uid = _user_of(self._kernel, peer, own)
        except OSError:
            return Peer.UNKNOWN
        if uid == NOT_HERE:
            return Peer.OTHER_USER if is_loopback(own.address) else Peer.REMOTE
        return Peer.OWN_USER if uid in {os.geteuid(), 0} else Peer.OTHER_USER

    def _addresses_here(self) -> frozenset[str]:
        """The addresses of this machine. An address added later, which no connection has shown yet, counts as another
        machine's: its users get less than local users, and no more than remote ones.
        """
        if self._own_addresses is None:
            try:
                own_interfaces = interfaces()
            except OSError:
                own_interfaces = []
            self._own_addresses = frozenset(address for interface in own_interfaces for address in interface.addresses)
        return self._own_addresses


def _parse_side(name: SocketName) -> _Side:
    address = unmapped_address(name[0].partition("%")[0])
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return _Side(family, address, name[1], name[3] if len(name) == 4 and family == socket.AF_INET6 else 0)


def _ask(kernel: _Kernel, source: _Side, target: _Side) -> int:
    """The user of the established socket from `source` to `target`, according to sock_diag(7)."""
    header = (_HEADER.size + _QUERY.size, _BY_FAMILY, _REQUEST, 1, 0)
    ports = _PORTS.pack(source.port, target.port)
    which = (source.family, socket.IPPROTO_TCP, 0, 0, _ANY_STATE, ports, source.packed, target.packed, source.scope)
    answer = kernel.ask(_HEADER.pack(*header) + _QUERY.pack(*which, _ANY_COOKIE))
    if _HEADER.unpack_from(answer)[1] == _ERROR:
        error = -int(struct.unpack_from("=i", answer, _HEADER.size)[0])
        if error != ENOENT:
            raise OSError(error, os.strerror(error))
        return NOT_HERE
    state, uid, inode = _FOUND.unpack_from(answer, _HEADER.size)
    return int(uid) if state == _ESTABLISHED and inode else NOT_HERE


def _read_tables(source: _Side, target: _Side) -> int:
    """The user according to /proc/net, which has one line per socket. Raises OSError if that is missing."""
    tables = {"/proc/net/tcp6": _entry_ends(source, target, as_ipv6=True)}
    if source.family == socket.AF_INET:
        tables["/proc/net/tcp"] = _entry_ends(source, target, as_ipv6=False)
    read = 0
    for path, ends in tables.items():
        with suppress(FileNotFoundError), open(path) as table:
            read += 1
            for line in table:
                # number, local and remote address, state, queues, timer, retransmissions, user, timeouts, inode
                fields = line.split(None, 10)
                if fields[1:3] == ends and int(fields[3], 16) == _ESTABLISHED and fields[9] != "0":
                    return int(fields[7])
    if not read:
        raise FileNotFoundError(ENOENT, "neither netlink nor /proc/net shows which user opened this connection")
    return NOT_HERE


def _entry_ends(source: _Side, target: _Side, *, as_ipv6: bool) -> list[str]:
    """Both ends as the tables show them: each word of the address as a number in this machine's byte order."""
    shown = []
    for side in (source, target):
        packed = _MAPPED + side.packed if as_ipv6 and side.family == socket.AF_INET else side.packed
        words = struct.unpack(f"={len(packed) // 4}I", packed)
        shown.append("".join(f"{word:08X}" for word in words) + f":{side.port:04X}")
    return shown
