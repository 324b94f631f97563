"""Ports that are kept for the workers of a round: chosen by the kernel, bound here, and never listened on here.

A worker can bind them nevertheless: gRPC, which jax and TensorFlow listen with, allows others of the same user at its
port (SO_REUSEPORT, SO_REUSEADDR), and so do these sockets. No other process gets the port meanwhile: the kernel does
not use it for outgoing connections, and refuses it to sockets that do not allow sharing.
"""

from __future__ import annotations

import errno
import socket


class ReservedPorts:
    """The ports of one use on one node, round by round."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def reserve(self, count: int) -> tuple[int, ...]:
        """Reserve this many new ports, and release those of the previous round.

        Raises:
            OSError: there are not enough.
        """
        previous, self._sockets = self._sockets, []
        try:
            for _ in range(count):
                self._sockets.append(_bound())
        finally:
            for each in previous:  # after that, so that no round gets a port of the one before
                each.close()
        return tuple(int(each.getsockname()[1]) for each in self._sockets)

    def close(self) -> None:
        """Release all. Idempotent."""
        self.reserve(0)


def _bound() -> socket.socket:
    """A socket bound to a port of all addresses, over IPv6 and IPv4, or, if there is no IPv6, over IPv4."""
    try:
        return _bind(socket.AF_INET6, "::")
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
        return _bind(socket.AF_INET, "")


def _bind(family: int, address: str) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        made.bind((address, 0))
    except BaseException:
        made.close()
        raise
    return made
