"""Ports for tests: another process may take a port that was free a moment ago, but not one that is held.

A socket that is bound and does not listen holds a port: the kernel gives it to no other process, neither to listen at
nor to connect from; connections to it are refused; and a process that names it may listen there (both with
SO_REUSEADDR).
"""

from __future__ import annotations

import socket
import threading
from collections import deque

_HELD = 100
"""How many ports are held at most: more than are in use by one test."""

_held: deque[socket.socket] = deque()
_lock = threading.Lock()


def free_port() -> int:
    """A port of the kernel's choice that it gives to nobody else while this process holds it."""
    dual = socket.has_dualstack_ipv6()
    holder = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if dual:
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    holder.bind(("", 0))
    with _lock:
        _held.append(holder)
        oldest = _held.popleft() if len(_held) > _HELD else None
    if oldest is not None:
        oldest.close()
    return int(holder.getsockname()[1])
