"""One port, and behind it a new store for each round: for servers that hand connections over by their first bytes.

A round's keys cannot be read in the next, although workers find both at the same address.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from rallypoint.store.server import StoreThread

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from rallypoint.store.guard import StoreGuard


class RoundStores:
    """The store of the present round, and those of earlier ones that still have connections. Used by any thread.

    Args:
        guard: who may connect, and what each may have.
        own_user: see `StoreThread`.
    """

    def __init__(self, guard: StoreGuard | None = None, *, own_user: bool = False) -> None:
        self._guard = guard
        self._own_user = own_user
        self._peers: list[Sequence[str] | None] = []  # who is, if that was said
        self._lock = threading.Lock()
        self._current: StoreThread | None = None
        self._previous: list[StoreThread] = []
        self._closed = False

    def add_connection(self, client: socket.socket, data: bytes) -> None:
        """Serve a connection, from which this has been read already; close it if it cannot be served.

        Raises:
            OSError: there are no descriptors, or no threads, for a store.
        """
        with self._lock:
            try:
                if self._current is None and not self._closed:
                    self._current = StoreThread("the store of this round", guard=self._guard, own_user=self._own_user)
                    for peers in self._peers:
                        self._current.set_peers(peers)
            finally:
                if self._current is None:
                    client.close()
            if self._current is not None:
                self._current.add_connection(client, data)

    def next_round(self) -> None:
        """From now on new connections get a new, empty store; old ones keep theirs."""
        with self._lock:
            if self._current is not None:
                self._previous.append(self._current)
                self._current = None

    def set_peers(self, peers: Sequence[str] | None) -> None:
        """As `StoreThread.set_peers`, for later rounds too."""
        from rallypoint.store.guard import networks

        networks(peers)
        with self._lock:
            self._peers = [peers]
            if self._current is not None:
                self._current.set_peers(peers)

    def end_previous(self) -> None:
        """End the connections to the stores of earlier rounds."""
        with self._lock:
            previous, self._previous = self._previous, []
        for store in previous:
            store.close()

    def close(self) -> None:
        """End all connections, those still to come as well. Idempotent."""
        with self._lock:
            self._closed = True
        self.next_round()
        self.end_previous()
