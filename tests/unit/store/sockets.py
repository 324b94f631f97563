"""A raw client of the store, for bytes that no real client would send."""

from __future__ import annotations

import socket
import struct
from types import TracebackType

from tests import typed_requests as wire

DEADLINE = 120.0
"""Seconds after which a test that waits for bytes fails."""


class Raw:
    """A connection to a store's server."""

    def __init__(self, port: int, host: str = "127.0.0.1", greet: bool = True, receive_buffer: int = 0) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(family)
        self.socket.settimeout(DEADLINE)
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.connect((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if greet:
            self.send(wire.Validate())

    def __enter__(self) -> Raw:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def send(self, *requests: wire.Request) -> None:
        """Send requests in one piece."""
        self.raw(b"".join(map(wire.encode, requests)))

    def raw(self, data: bytes) -> None:
        """Send bytes."""
        self.socket.sendall(data)

    def reads_fast(self) -> None:
        """Read in large pieces from now on."""
        self.socket.settimeout(DEADLINE)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)

    def receive(self, size: int) -> bytes:
        """Read `size` bytes, or fewer if the connection closes."""
        data, have = memoryview(bytearray(size)), 0
        while have < size and (more := self.socket.recv_into(data[have:])):
            have += more
        return bytes(data[:have])

    def value(self) -> bytes:
        """A string of the reply."""
        return self.receive(struct.unpack("<Q", self.receive(8))[0])

    def ping(self) -> bool:
        """Whether the server answers; then it has executed all earlier requests."""
        self.send(wire.Ping(7))
        return self.receive(4) == b"\x07\0\0\0"

    def closed(self) -> bool:
        """Wait until the server closes or sends something; return whether it closed."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True
