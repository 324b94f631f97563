"""Aborts calls that wait for other workers when the round has ended: runs the users' hooks, and our own for torch.

torch is looked up and never imported.

Gloo cannot abort a call that waits for a live worker: its groups' `abort` and `shutdown` do nothing. A store's client
waits until the store answers. Both wait in C++, where neither a signal nor an abort reaches them, and give up only when
the connection ends. We find these connections because gloo's thread has a name, and the kernel shows which epoll
instance the thread is waiting on and which sockets belong to that instance.

While a group is created, gloo also waits for other workers to connect, forever if they are gone. Gloo identifies a peer
by the number that it sends first. So we connect and send that number. When our connection ends, gloo takes the peer's
connection to have ended.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Thread
from typing import Any

_C10D = "torch.distributed.distributed_c10d"
_MAKES_A_GROUP = "_new_process_group_helper"
"""The function of torch that creates a process group."""
_GLOO_THREAD = "gloo_tcp_loop"
_EPOLL = "anon_inode:[eventpoll]"
_INODES = re.compile(r"^tfd:.*\sino:([0-9a-f]+)", re.MULTILINE)
_NUMBER = struct.Struct("=q")
_MOST = 1024
"""Maximum number of connections that we open on behalf of other workers."""
_TRIES, _MOMENT = 20, 0.001
"""Seconds between tries. A computing thread does not show what it waits on, but gloo's thread nearly always waits."""

_hooks: list[Callable[[], None]] = []


def on_round_end(abort: Callable[[], None]) -> Callable[[], None]:
    """Register a hook that aborts waits for other workers when a round ends; torch's groups need none.

    The hook is called on another thread, repeatedly while the function is still running and once after it has ended, so
    it must be harmless if nothing is waiting. Its exceptions are logged. Usable as a decorator.
    """
    _hooks.append(abort)
    return abort


class Aborting:
    """Runs all hooks on its own thread, one run at a time."""

    def __init__(self) -> None:
        self._thread: Thread | None = None

    def start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = Thread(target=run_hooks, name="rallypoint-abort", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()


def run_hooks() -> None:
    for hook in (abort_groups, *_hooks):
        try:
            hook()
        except Exception:
            from logging import getLogger

            name = getattr(hook, "__qualname__", hook)
            getLogger(__name__).warning("the end-of-round hook %s failed (see on_round_end)", name, exc_info=True)


# torch's process groups


def abort_groups() -> None:
    """Make all waits for other workers return, on all threads."""
    groups = c10d()
    if groups is None:
        return
    end_connections(_number("MASTER_PORT"), _number("WORLD_SIZE") if _makes_a_group() else 0)
    _abort_nccl(groups)


def destroy_groups() -> None:
    """Forget all groups, so that `init_process_group` can be called again. Call this after `abort_groups`, on the main
    thread. Raises whatever torch raises.
    """
    groups = c10d()
    if groups is None:
        return
    names = groups._world.pg_names
    if not groups.is_initialized() and names:  # interrupted while the first group was created
        groups._update_default_pg(next(iter(names)))
    if groups.is_initialized():
        groups.destroy_process_group()
    # A group that was counted but never created would make later groups' names differ from those in new workers.
    groups._world.group_count = 0


def _makes_a_group() -> bool:
    """Whether the main thread is creating a group, and so may be waiting for others to connect."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_name != _MAKES_A_GROUP:
        frame = frame.f_back
    return frame is not None


def _number(variable: str) -> int:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else 0


def c10d() -> Any:
    """torch's module for process groups; None if it has not been (completely) imported."""
    module = sys.modules.get(_C10D)
    return module if hasattr(module, "init_process_group") and hasattr(module, "_world") else None


def _abort_nccl(c10d: Any) -> None:
    """Abort all NCCL groups together, as torch itself does before it forgets them."""
    groups = sorted(dict(c10d._world.pg_names).items(), key=lambda item: item[1], reverse=True)
    nccl = _nccl_backend(c10d)
    if nccl is not None:
        nccl._group_start()  # otherwise the communicators' aborts would wait for each other
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


# Connections


def end_connections(store_port: int, workers: int) -> None:
    """Close all connections of gloo and to a store. Does nothing without `/proc`.

    `workers` is how many workers may still have to connect; 0 if no group is being created.
    """
    with suppress(OSError):
        gloo = set(_gloo_inodes())
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    _end(int(name), gloo, store_port, min(workers, _MOST))


def _end(number: int, gloo: set[int], store_port: int, workers: int) -> None:
    with socket.socket(fileno=os.dup(number)) as connection:  # a copy, which cannot become another file meanwhile
        # The inode shows whether the descriptor is still the listed socket.
        is_gloo = os.fstat(connection.fileno()).st_ino in gloo
        if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            if is_gloo or _port(connection) == store_port:
                connection.shutdown(socket.SHUT_RDWR)
        elif is_gloo:
            for worker in range(workers):
                with socket.socket(connection.family) as other:
                    other.connect(connection.getsockname())
                    other.send(_NUMBER.pack(worker))


def _port(connection: socket.socket) -> int:
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
    """The epoll descriptor on which a thread waits.

    Raises OSError, ValueError: the thread has ended, or the kernel does not tell.
    """
    for _ in range(_TRIES):
        call = _read(f"/proc/self/task/{thread}/syscall").split()
        if len(call) > 1:
            descriptor = int(call[1], 16)
            if os.readlink(f"/proc/self/fd/{descriptor}") == _EPOLL:
                return descriptor
        time.sleep(_MOMENT)
    raise ValueError(f"gloo's thread {thread} is not waiting on an epoll instance")


def _read(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read()
