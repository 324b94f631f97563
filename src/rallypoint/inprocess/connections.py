"""Ends connections on which torch waits in C++, where neither a signal nor an abort reaches it.

Gloo cannot abort what waits for a worker that lives: its groups' `abort` and `shutdown` do nothing. A client of the
store waits until the store answers. Both give up when the connection ends. The thread in which gloo waits for its
connections has a name, the kernel says on which epoll instance it waits, and which sockets that has.

While a group is made, gloo also waits for connections that others are to make to it, without end if these have gone.
It takes the number that comes first in a connection for the other's, so one of our own with that number is taken for
it, and its end for the other's.
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
"""Of connections that are made in the place of others."""
_TRIES, _MOMENT = 20, 0.001
"""A thread that computes does not say where it waits; this one waits nearly all the time. Seconds between tries."""


def end_connections(store_port: int, workers: int) -> None:
    """End all of gloo's connections, and those to a store; nothing where there is no `/proc`.

    Args: `store_port`: the store's; `workers`: who may not have made their connections, 0 where no group is made.
    """
    with suppress(OSError):
        gloo = set(_gloo_inodes())
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    _end(int(name), gloo, store_port, min(workers, _MOST))


def _end(number: int, gloo: set[int], store_port: int, workers: int) -> None:
    with socket.socket(fileno=os.dup(number)) as found:  # which cannot become another file meanwhile
        # The inode tells it from whatever may have become of the descriptor since it was listed.
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
    """At the other end; -1 if that has none."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return -1
    try:
        return int(connection.getpeername()[1])
    except OSError:  # it listens, or has ended
        return -1


def _gloo_inodes() -> Iterator[int]:
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError, ValueError):
            if _read(f"/proc/self/task/{thread}/comm").strip() == _GLOO_THREAD:
                watched = _read(f"/proc/self/fdinfo/{_epoll_instance(thread)}")
                yield from (int(inode, 16) for inode in _INODES.findall(watched))


def _epoll_instance(thread: str) -> int:
    """The descriptor on which it waits.

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
