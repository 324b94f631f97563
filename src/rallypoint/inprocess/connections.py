"""Closes connections on which torch waits in C++, where neither a signal nor an abort reaches it.

Gloo cannot abort a call that waits for a live worker: its groups' `abort` and `shutdown` do nothing. A client of the
store waits until the store answers. Both give up when the connection ends. The thread in which gloo waits for its
connections has a name, and the kernel shows on which epoll instance it waits, and which sockets that has.

While a group is made, gloo also waits for other workers to connect to it, and waits forever if these are gone. It
identifies the peer by the number that comes first in a connection, so it takes a connection of ours with that number
for the peer's, and its end for the end of the peer's.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress

_GLOO_THREAD = "gloo_tcp_loop"
_EPOLL = "anon_inode:[eventpoll]"
_INODES = re.compile(r"^tfd:.*\sino:([0-9a-f]+)", re.MULTILINE)
_NUMBER = struct.Struct("=q")
_MOST = 1024
"""The most connections that are made in the place of other workers."""
_TRIES, _MOMENT = 20, 0.001
"""Seconds between tries: a thread that is computing does not show where it waits; this one nearly always waits."""


def end_connections(store_port: int, workers: int) -> None:
    """Close all of gloo's connections, and those to a store; does nothing where there is no `/proc`.

    Args: `store_port`: the store's; `workers`: how many may not have connected yet, 0 where no group is being made.
    """
    with suppress(OSError):
        gloo = set(_gloo_inodes())
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    _end(int(name), gloo, store_port, min(workers, _MOST))


def _end(number: int, gloo: set[int], store_port: int, workers: int) -> None:
    with socket.socket(fileno=os.dup(number)) as found:  # which cannot become another file meanwhile
        # The inode shows whether the descriptor still is what it was when it was listed.
        is_gloo = os.fstat(found.fileno()).st_ino in gloo
        if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            if is_gloo or _port(found) == store_port:
                found.shutdown(socket.SHUT_RDWR)
        elif is_gloo:
            for each in range(workers):
                with socket.socket(found.family) as other:
                    other.connect(found.getsockname())
                    other.send(_NUMBER.pack(each))


def _port(connection: socket.socket) -> int:
    """The port at the other end; -1 if that has none."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return -1
    try:
        return int(connection.getpeername()[1])
    except OSError:  # a listening or closed socket
        return -1


def _gloo_inodes() -> Iterator[int]:
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError, ValueError):
            if _read(f"/proc/self/task/{thread}/comm").strip() == _GLOO_THREAD:
                watched = _read(f"/proc/self/fdinfo/{_epoll_instance(thread)}")
                yield from (int(inode, 16) for inode in _INODES.findall(watched))


def _epoll_instance(thread: str) -> int:
    """The descriptor on which a thread waits.

    Raises:
        OSError, ValueError: the thread has ended, or the kernel does not say.
    """
    for _ in range(_TRIES):
        call = _read(f"/proc/self/task/{thread}/syscall").split()
        if len(call) > 1:
            descriptor = int(call[1], 16)
            if os.readlink(f"/proc/self/fd/{descriptor}") == _EPOLL:
                return descriptor
        time.sleep(_MOMENT)
    raise ValueError(f"thread {thread} of gloo waits on no epoll instance")


def _read(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read()
