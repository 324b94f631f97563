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
        links = list(_parse_dump(kernel, _GETLINK, _NEWLINK))
        addresses: dict[int, list[str]] = {}
        for message in _parse_dump(kernel, _GETADDR, _NEWADDR):
            family, _, _, scope, interface = _ADDRESS.unpack_from(message)
            packed = _packed(message)
            counts = family == socket.AF_INET or (family == socket.AF_INET6 and scope != _LINK_SCOPE)
            if packed is not None and counts:
                addresses.setdefault(interface, []).append(socket.inet_ntop(family, packed))
    found = []
    for message in links:
        _, _, interface, flags, _ = _LINK.unpack_from(message)
        name = dict(_attributes(message[_LINK.size :])).get(_IFLA_NAME, b"").rstrip(b"\0").decode(errors="replace")
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
            links = [_LINK.unpack_from(each) for each in _parse_dump(kernel, _GETLINK, _NEWLINK)]
            up = {interface for _, _, interface, flags, _ in links if flags & _UP}
            found = [_address(each, up) for each in _parse_dump(kernel, _GETADDR, _NEWADDR)]
    except (OSError, struct.error):
        return None
    addresses = tuple(dict.fromkeys(each for each in found if each))
    return addresses if len(addresses) <= MAX_ADDRESSES else None


def _parse_dump(kernel: socket.socket, request: int, answer: int) -> Iterator[bytes]:
    """The kernel's messages in reply to a dump request. OSError if it refuses."""
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
                yield data[at + _HEADER.size : at + size]
            at += (size + 3) & ~3


def _address(message: bytes, up: set[int]) -> str:
    family, _, flags, scope, interface = _ADDRESS.unpack_from(message)
    packed = _packed(message)
    if packed is None or interface not in up or family not in {socket.AF_INET, socket.AF_INET6}:
        return ""
    address = socket.inet_ntop(family, packed)
    if address.startswith("127.") or address == "::1":
        return ""
    if family == socket.AF_INET:
        return address
    return "" if scope == _LINK_SCOPE else f"{address}/64" if flags & _TEMPORARY else address


def _packed(message: bytes) -> bytes | None:
    attributes = dict(_attributes(message[_ADDRESS.size :]))
    return attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        size, kind = _ATTRIBUTE.unpack_from(data, at)
        if size < _ATTRIBUTE.size:
            return
        yield kind, data[at + _ATTRIBUTE.size : at + size]
        at += (size + 3) & ~3
