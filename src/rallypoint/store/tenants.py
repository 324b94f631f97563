"""Servers that several stores of one process share by their port (`multi_tenant`, contract section 9.5)."""

from __future__ import annotations

import os
import threading

from rallypoint.store.server import StoreServer

_lock = threading.RLock()  # a finalizer may come in between, and `move_out` a store
_tenants: dict[int, list[StoreServer]] = {}  # for each port its server, once for each store that uses it


def move_in(port: int) -> StoreServer:
    """The shared server on `port`, started if there is none; 0 always starts one.

    Raises:
        OSError: the port is taken by somebody else.
    """
    with _lock:
        homes = _tenants.get(port)
        server = homes[0] if homes else StoreServer(port=port)
        _tenants.setdefault(server.port, []).append(server)
        return server


def move_out(server: StoreServer) -> bool:
    """One store less uses `server`. Whether it is now the caller's, to be closed: nobody else uses it."""
    with _lock:
        homes = _tenants.get(server.port, [])
        if server not in homes:
            return True
        homes.pop()
        if homes:
            return False
        del _tenants[server.port]
        return True


def _begin_anew() -> None:
    """In a copy of this process nobody serves; what listens is the original's."""
    global _lock
    _lock = threading.RLock()
    _tenants.clear()


os.register_at_fork(after_in_child=_begin_anew)
