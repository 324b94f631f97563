"""torch's process groups at the end of a round. torch is looked up, and never imported.

Gloo has no way to abort what waits for a worker that lives: its groups' `abort` and `shutdown` do nothing, and signals
do not end the wait. What does is the end of its connections. The thread in which gloo waits for these has a name, the
kernel says which epoll instance it waits on, and that which sockets are its own.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

_C10D = "torch.distributed.distributed_c10d"
_GLOO_THREAD = "gloo_tcp_loop"
_SOCKET_LINE = re.compile(r"^tfd:\s*(\d+).*\sino:([0-9a-f]+)", re.MULTILINE)
_TRIES, _MOMENT = 20, 0.001
"""A thread that computes does not say where it waits; this one waits nearly all the time. Seconds between tries."""


def abort() -> None:
    """Make every wait for another worker return, on whichever thread it is."""
    c10d = _c10d()
    if c10d is None:
        return
    for number, inode in set(_gloo_sockets()):
        _shut(number, inode)
    _abort_groups(c10d)


def destroy() -> None:
    """Forget all groups, so that `init_process_group` can be called again. After `abort`, in the main thread.

    Raises:
        Exception: whatever torch raises.
    """
    c10d = _c10d()
    if c10d is None:
        return
    names = c10d._world.pg_names
    if not c10d.is_initialized() and names:  # interrupted while the first group was made
        c10d._update_default_pg(next(iter(names)))
    if c10d.is_initialized():
        c10d.destroy_process_group()


def _c10d() -> Any:
    """torch's module of groups; None where it is not imported, or not to the end yet."""
    found = sys.modules.get(_C10D)
    return found if hasattr(found, "init_process_group") and hasattr(found, "_world") else None


def _abort_groups(c10d: Any) -> None:
    """Abort NCCL's groups, all at once, as torch itself does before it forgets them."""
    groups = sorted(dict(c10d._world.pg_names).items(), key=lambda item: item[1], reverse=True)
    nccl = _nccl_backend(c10d)
    if nccl is not None:
        nccl._group_start()  # so that the aborts of several communicators do not wait for each other
    try:
        for group, _ in groups:
            group.abort()
    finally:
        if nccl is not None:
            nccl._group_end()


def _nccl_backend(c10d: Any) -> Any:
    default = c10d.GroupMember.WORLD
    if default is None or not c10d.is_nccl_available():
        return None
    try:
        backend = default._get_backend(sys.modules["torch"].device("cuda"))
    except RuntimeError:  # a group for CPUs only
        return None
    return backend if isinstance(backend, c10d.ProcessGroupNCCL) else None


def _gloo_sockets() -> Iterator[tuple[int, int]]:
    """Descriptor and inode of each socket of gloo."""
    with suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError, ValueError):
                if _read(f"/proc/self/task/{thread}/comm").strip() == _GLOO_THREAD:
                    instance = _read(f"/proc/self/fdinfo/{_epoll_instance(thread)}")
                    yield from ((int(number), int(inode, 16)) for number, inode in _SOCKET_LINE.findall(instance))


def _epoll_instance(thread: str) -> int:
    """The descriptor on which it waits.

    Raises:
        OSError, ValueError: the thread has ended, or the kernel does not say.
    """
    for _ in range(_TRIES):
        call = _read(f"/proc/self/task/{thread}/syscall").split()
        if len(call) > 1:
            descriptor = int(call[1], 16)
            if os.readlink(f"/proc/self/fd/{descriptor}") == "anon_inode:[eventpoll]":
                return descriptor
        time.sleep(_MOMENT)
    raise ValueError(f"thread {thread} of gloo waits on no epoll instance")


def _shut(number: int, inode: int) -> None:
    """End the connection, if the descriptor still is that socket."""
    with suppress(OSError):
        copy = os.dup(number)  # which cannot become another file meanwhile
        try:
            status = os.fstat(copy)
            if status.st_ino == inode and stat.S_ISSOCK(status.st_mode):
                _shut_connection(socket.socket(fileno=copy))
        finally:
            os.close(copy)


def _shut_connection(connection: socket.socket) -> None:
    try:
        if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            connection.shutdown(socket.SHUT_RDWR)
    finally:
        connection.detach()


def _read(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read()
