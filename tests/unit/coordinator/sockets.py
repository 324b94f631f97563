"""A node that is nothing but a socket, for what no link of ours would do."""

from __future__ import annotations

import socket

from rallypoint.control.protocol import codec
from rallypoint.control.protocol.codec import MAGIC, FrameReader, frame
from rallypoint.control.protocol.handshake import Hello, Welcome


class SocketNode:
    """What a node says on one connection, and what the server answers, message by message."""

    def __init__(self, made: socket.socket) -> None:
        self.made = made
        self._frames = FrameReader()
        self._unread: list[bytes] = []

    def greets(self, hello: Hello) -> Welcome:
        """Open a session at a server without a secret."""
        self.made.sendall(MAGIC + frame(codec.encode(hello)))
        welcome = codec.decode_answer(self.next())
        assert isinstance(welcome, Welcome)
        return welcome

    def says(self, message: object) -> None:
        """Send a message."""
        self.made.sendall(frame(codec.encode(message)))

    def next(self) -> bytes:
        """The next message of the server."""
        while not self._unread:
            data = self.made.recv(65536)
            assert data, "it closed the connection"
            self._unread += self._frames.feed(data)
        return self._unread.pop(0)
