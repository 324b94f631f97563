"""The stores in Python and C, driven step by step without a loop."""

from __future__ import annotations

import logging
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rallypoint.base.endpoint import listening_socket
from rallypoint.base.log import RateLimitedLog, get_logger
from rallypoint.store.server import STORE_VARIABLE, open_transport
from rallypoint.store.transport import StoreGuard, StoreTransport, TransportContext
from tests import typed_requests as wire

KINDS = ["python", "compiled"]
RETRY = 0.05
"""Seconds until a bench without resources accepts again."""


def _forbidden(*_limit: object) -> None:
    raise ValueError("not in this sandbox")


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    """Let this process open no more files, and not raise its limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    plugs = [os.dup(2)]
    while plugs[-1] < highest:  # fill the gaps
        plugs.append(os.dup(2))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(highest, plugs[-1]) + 1, before[1]))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(resource, "setrlimit", _forbidden)
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for plug in plugs:
            os.close(plug)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(f"{record.levelname}: {record.getMessage()}")


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the lines that the store logs."""
    handler, logger = Lines(), logging.getLogger("rallypoint.store")
    logger.addHandler(handler)
    yield handler.seen
    logger.removeHandler(handler)


def is_compiled() -> bool:
    """Whether the store in C was built here."""
    try:
        import rallypoint.store.compiled
    except ImportError:
        return False
    return bool(rallypoint.store.compiled)


def choose(kind: str, patch: pytest.MonkeyPatch) -> None:
    """Make this process and its children use this kind of server."""
    if kind == "python":
        patch.setenv(STORE_VARIABLE, "python")
        return
    patch.delenv(STORE_VARIABLE, raising=False)
    if not is_compiled():
        pytest.skip("the store in C was not built: there was no compiler, or no headers of Python, at installation")


class Peer:
    """The client's end of a connection."""

    def __init__(self, far: socket.socket) -> None:
        self.far = far
        self.closed = False

    def received(self, most: int = 1 << 30) -> bytes:
        """Read what has arrived, at most `most` bytes."""
        data = bytearray()
        while len(data) < most and not self.closed:
            try:
                piece = self.far.recv(min(most - len(data), 1 << 16))
            except BlockingIOError:
                break
            except ConnectionResetError:  # the store closed it and left data unread
                piece = b""
            self.closed = not piece
            data += piece
        return bytes(data)


class Bench:
    """A store and connections to it, driven by `turn`."""

    def __init__(self, guard: StoreGuard) -> None:
        self._listener = listening_socket("127.0.0.1", 0)
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lines = RateLimitedLog(get_logger("rallypoint.store"), "connections that it refused")
        self.port: int = self._listener.getsockname()[1]
        self.transport: StoreTransport = open_transport(
            TransportContext(self._listener, self.wake, self._lines, guard, RETRY)
        )
        self._peers: list[Peer] = []

    def connect(self, greet: bool = True, buffer: int = 0) -> Peer:
        """Add a client.

        Args:
            buffer: the size of the store's send buffer in bytes; 0 for the default.
        """
        near, far = socket.socketpair()
        if buffer:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        self.transport.add_connection(near)
        far.setblocking(False)
        peer = Peer(far)
        self._peers.append(peer)
        if greet:
            self.send(peer, wire.encode(wire.Validate()))
        return peer

    def send(self, peer: Peer, data: bytes) -> None:
        """Send all of it, with as many turns as that takes, then handle it."""
        while True:
            try:
                sent = peer.far.send(data) if data else 0
            except BlockingIOError:
                self.turn()
                continue
            except (BrokenPipeError, ConnectionResetError):
                break
            data = data[sent:]
            if not data:
                break
        self.turn()

    def turn(self) -> None:
        """Let the store work until it is idle."""
        while self.transport.run_once():
            pass

    def close(self) -> None:
        self.transport.close()
        self.transport.release_memory()
        self._listener.close()
        os.close(self.wake)
        for peer in self._peers:
            peer.far.close()


@contextmanager
def bench(kind: str, guard: StoreGuard = StoreGuard()) -> Iterator[Bench]:  # noqa: B008 - it never changes
    """Create a store of this kind, and check that it closes its descriptors."""
    with pytest.MonkeyPatch.context() as patch:
        choose(kind, patch)
        made = Bench(guard)
        wanted = "CompiledTransport" if kind == "compiled" else "PlainTransport"
        assert type(made.transport).__name__ == wanted
    before = len(os.listdir("/proc/self/fd"))
    try:
        yield made
    finally:
        made.close()
    assert len(os.listdir("/proc/self/fd")) < before
