"""Sums over all workers of a round, over TCP: what `all_reduce` of gloo or NCCL is to real training.

Laws:

1. Rank 0 adds up in order of rank, so that all have the same bits, and every run of as many workers has them too.
2. A worker that is gone is an error to all others, at once: its connection ends.
3. Who finds the address of an earlier round tries again: only rank 0 of this round says hello.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

from rallypoint.store.client import TCPStore

_HELLO = b"demo"
_KEY = "rallypoint/demo/address"
_TIMEOUT = 60.0
"""Seconds until all workers of a round have to be there."""
_RETRY = 0.02


class PeersError(Exception):
    """The other workers are gone, or did not come."""


class Peers:
    """The workers of one round, as one of them sees them."""

    def __init__(self, rank: int, world_size: int, store: tuple[str, int]) -> None:
        """Connect all workers; returns when they are.

        Args:
            rank: of this worker.
            world_size: number of workers.
            store: host and port of the round's worker store, through which rank 0 says where it listens.

        Raises:
            PeersError: not all of them came.
        """
        self._rank = rank
        self._others: list[socket.socket] = []
        if world_size == 1:
            return
        found = TCPStore(*store, timeout=_TIMEOUT)
        try:
            self._others = _accept(world_size, found) if rank == 0 else [_connect(rank, found)]
        except (OSError, TimeoutError) as error:
            raise PeersError(f"not all of {world_size} workers have met: {error}") from None

    def sum(self, numbers: Sequence[float]) -> tuple[float, ...]:
        """Add up each number over all workers.

        Raises:
            PeersError: one of them is gone.
        """
        form = struct.Struct(f"<{len(numbers)}d")
        try:
            if self._rank:
                self._others[0].sendall(form.pack(*numbers))
                return form.unpack(_receive(self._others[0], form.size))
            parts = [tuple(numbers), *(form.unpack(_receive(each, form.size)) for each in self._others)]
            total = tuple(map(sum, zip(*parts, strict=True)))
            for each in self._others:
                each.sendall(form.pack(*total))
            return total
        except OSError as error:
            raise PeersError(f"a worker is gone: {error}") from None

    def close(self) -> None:
        """Close the connections."""
        for each in self._others:
            each.close()


def _accept(world_size: int, store: TCPStore) -> list[socket.socket]:
    """Rank 0: listen, say where, and take a connection from each other rank; in order of rank."""
    found: dict[int, socket.socket] = {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_TIMEOUT)
        store.set(_KEY, str(server.getsockname()[1]).encode())
        while len(found) < world_size - 1:
            connection, _ = server.accept()
            connection.settimeout(_TIMEOUT)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(_HELLO)
            found[int.from_bytes(_receive(connection, 4), "little")] = connection
    return [found[rank] for rank in sorted(found)]


def _connect(rank: int, store: TCPStore) -> socket.socket:
    """Any other rank: find rank 0 of this round."""
    deadline = time.monotonic() + _TIMEOUT
    while time.monotonic() < deadline:
        with suppress(OSError):
            connection = socket.create_connection(("127.0.0.1", int(store.get(_KEY))), timeout=_TIMEOUT)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if _receive(connection, len(_HELLO)) == _HELLO:
                connection.sendall(rank.to_bytes(4, "little"))
                return connection
        time.sleep(_RETRY)
    raise TimeoutError(f"rank 0 was not there within {_TIMEOUT:.0f} s")


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionResetError("the connection has ended")
        data += more
    return bytes(data)
