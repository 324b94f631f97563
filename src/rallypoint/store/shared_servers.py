"""Servers that several stores of one process share by their port (`multi_tenant`, contract section 9.5)."""

from __future__ import annotations

import os
import threading

from rallypoint.store.server import StoreServer

_lock = threading.RLock()  # a finalizer may come in between, and `release_server` a store
_servers: dict[int, list[StoreServer]] = {}  # for each port its server, once for each store that uses it


def acquire_server(port: int) -> StoreServer:
    """The shared server on `port`, started if there is none; 0 always starts one.

    Raises:
        OSError: the port is taken by somebody else.
    """
    with _lock:
        homes = _servers.get(port)
        server = homes[0] if homes else StoreServer(port=port)
        _servers.setdefault(server.port, []).append(server)
        return server


def release_server(server: StoreServer) -> bool:
    """One store less uses `server`. Whether it is now the caller's, to be closed: nobody else uses it."""
    with _lock:
        homes = _servers.get(server.port, [])
        if server not in homes:
            return True
        homes.pop()
        if homes:
            return False
        del _servers[server.port]
        return True


def _reset_after_fork() -> None:
    """In a copy of this process nobody serves; what listens is the original's."""
    global _lock
    _lock = threading.RLock()
    _servers.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
