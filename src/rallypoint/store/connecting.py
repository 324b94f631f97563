"""Getting a connection to a store's server: look the name up, connect, greet; again and again until the deadline.

The server may start later than its clients, and its name may resolve later still, so every step is retried. Only an
answer that no store gives ends it at once.
"""

from __future__ import annotations

import os
import socket
import time

from rallypoint.base.clock import Deadline
from rallypoint.base.endpoint import Endpoint
from rallypoint.store import wire
from rallypoint.store.errors import StoreConnectionError, StoreProtocolError

_FIRST_DELAY = 0.01
_MAX_DELAY = 1.0
_MAX_BLOCK = 1e6
"""Seconds of the longest single wait that the kernel's poll can count; longer waits take several."""


def connect(endpoint: Endpoint, timeout: float) -> socket.socket:
    """A socket connected to the store at `endpoint`, greeted and answered within `timeout` seconds.

    Raises:
        StoreConnectionError: no store answered in time; the message has the last reason.
        StoreProtocolError: something else than a store answered.
    """
    deadline = Deadline.after(timeout)
    delay = _FIRST_DELAY
    while True:
        try:
            return _try_once(endpoint, deadline)
        except OSError as error:
            last = error_reason(error)
        if deadline.expired:
            raise StoreConnectionError(
                f"no store answered at {endpoint} within {timeout:g} s ({last}); "
                "see whether host and port are right and its server is running"
            )
        # A jitter, so that a thousand clients of one lost server do not come back at the same moment.
        time.sleep(min(delay * (0.5 + os.urandom(1)[0] / 512), deadline.remaining()))
        delay = min(2 * delay, _MAX_DELAY)


def receive(connection: socket.socket, size: int, deadline: Deadline) -> bytes:
    """Exactly `size` bytes. Memory grows with what arrives, not with what was announced.

    Raises:
        TimeoutError: they did not come before the deadline.
        ConnectionError: the connection closed before.
    """
    data = bytearray()
    while len(data) < size:
        connection.settimeout(min(deadline.remaining(), _MAX_BLOCK))
        try:
            piece = connection.recv(min(size - len(data), 1 << 20))
        except (TimeoutError, BlockingIOError):
            if deadline.expired:
                raise TimeoutError(f"{len(data)} of {size} bytes came in time") from None
            continue
        if not piece:
            raise ConnectionResetError("the server closed the connection")
        data += piece
    return bytes(data)


def _try_once(endpoint: Endpoint, deadline: Deadline) -> socket.socket:
    """Try each address of the host once, none of them so long that no time is left for the next."""
    found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    failure: OSError = OSError("the name has no address")
    for tried, (family, kind, protocol, _, address) in enumerate(found):
        share = Deadline.after(deadline.remaining() / (len(found) - tried))
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(min(max(share.remaining(), 0.001), _MAX_BLOCK))
            connection.connect(address)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _greet(connection, endpoint, share)
        except OSError as error:
            connection.close()
            failure = error
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise failure


def _greet(connection: socket.socket, endpoint: Endpoint, deadline: Deadline) -> None:
    nonce = os.getpid() & 0xFFFFFFFF
    connection.sendall(wire.greeting() + wire.encode(wire.Op.PING, nonce))
    try:
        answer = receive(connection, wire.U32.size, deadline)
    except TimeoutError:
        raise TimeoutError("the connection was accepted but the greeting never answered") from None
    if answer != wire.U32.pack(nonce):
        raise StoreProtocolError(
            f"{endpoint} is not a store: it answered a store's greeting with {answer!r}; see whether the port is right"
        )


def error_reason(error: BaseException) -> str:
    """An error in a few words, for a sentence that says what it ended."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
