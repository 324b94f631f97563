"""The addresses of this machine's interfaces, from the kernel (rtnetlink(7)). Imported only when needed."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

MAX_ADDRESSES = 256
"""A machine with more addresses, such as a load balancer, counts as unknown."""

_NEWLINK, _GETLINK, _NEWADDR, _GETADDR = 16, 18, 20, 22
_ERROR, _DONE = 2, 3
_REQUEST_DUMP = 0x301
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ADDRESS = struct.Struct("=BBBBI")  # family, bits of the network, flags, scope, interface
_LINK = struct.Struct("=BxHiII")  # family, kind, interface, flags, which of these count
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_IFLA_NAME = 3
_UP, _LOOPBACK = 1, 8
_TEMPORARY = 1
_LINK_SCOPE = 253
_TIMEOUT = 5.0


class Interface(NamedTuple):
    """One network interface and its addresses, without link-local ones of IPv6."""

    name: str
    is_loopback: bool
    addresses: tuple[str, ...]


def interfaces() -> list[Interface]:
    """The interfaces of this machine that are up, in the kernel's order.

    Raises:
        OSError: the kernel does not list them.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.settimeout(_TIMEOUT)
        links = list(_dump(kernel, _GETLINK, _NEWLINK, _LINK))
        addresses: dict[int, list[str]] = {}
        for (family, _, _, scope, interface), attributes in _dump(kernel, _GETADDR, _NEWADDR, _ADDRESS):
            packed = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
            counts = family == socket.AF_INET or (family == socket.AF_INET6 and scope != _LINK_SCOPE)
            if packed is not None and counts:
                addresses.setdefault(interface, []).append(socket.inet_ntop(family, packed))
    found = []
    for (_, _, interface, flags, _), attributes in links:
        name = attributes.get(_IFLA_NAME, b"").rstrip(b"\0").decode(errors="replace")
        if flags & _UP and name:
            found.append(Interface(name, bool(flags & _LOOPBACK), tuple(addresses.get(interface, ()))))
    return found


def interface_addresses() -> tuple[str, ...] | None:
    """Addresses from which this machine may connect to others, IPv4 and IPv6, each once; None if they are unknown.

    All of interfaces that are up, without the loopback and link-local ones. Temporary IPv6 addresses change by
    themselves: for these it is their network.
    """
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
            kernel.settimeout(_TIMEOUT)
            links = _dump(kernel, _GETLINK, _NEWLINK, _LINK)
            up = {interface for (_, _, interface, flags, _), _ in links if flags & _UP}
            found: dict[str, None] = {}
            for (family, _, flags, scope, interface), attributes in _dump(kernel, _GETADDR, _NEWADDR, _ADDRESS):
                packed = attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)
                if packed is None or interface not in up or family not in {socket.AF_INET, socket.AF_INET6}:
                    continue
                address = socket.inet_ntop(family, packed)
                seen_by_others = not address.startswith("127.") and address != "::1"
                if seen_by_others and (family == socket.AF_INET or scope != _LINK_SCOPE):
                    found[f"{address}/64" if family == socket.AF_INET6 and flags & _TEMPORARY else address] = None
    except (OSError, struct.error):
        return None
    return tuple(found) if len(found) <= MAX_ADDRESSES else None


def _dump(
    kernel: socket.socket, request: int, answer: int, head: struct.Struct
) -> Iterator[tuple[tuple[int, ...], dict[int, bytes]]]:
    """The head and the attributes of each message in reply to a dump request. OSError if the kernel refuses."""
    kernel.send(_HEADER.pack(_HEADER.size + 8, request, _REQUEST_DUMP, 1, 0) + bytes(8))
    while True:
        data = kernel.recv(65536)
        at = 0
        while at < len(data):
            size, kind, *_ = _HEADER.unpack_from(data, at)
            if kind == _DONE:
                return
            if kind == _ERROR or size < _HEADER.size:
                raise OSError("the kernel does not list its interfaces")
            if kind == answer:
                message = data[at + _HEADER.size : at + size]
                yield head.unpack_from(message), dict(_attributes(message[head.size :]))
            at += (size + 3) & ~3


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        size, kind = _ATTRIBUTE.unpack_from(data, at)
        if size < _ATTRIBUTE.size:
            return
        yield kind, data[at + _ATTRIBUTE.size : at + size]
        at += (size + 3) & ~3
