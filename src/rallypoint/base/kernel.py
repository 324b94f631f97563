"""The kernel's calls that an agent needs, and a check before anything is started that it may use them.

This is the only place that knows which system we are on. On other systems than Linux, or with
`RALLYPOINT_PLATFORM=portable`, `base/portable` has replacements for the calls that only Linux has (docs/how-to/macos.md
says what they lack); on Linux each name is the kernel's own call, and that file is not imported.

A sandbox (the seccomp profile of a container) may deny system calls, and a root folder may lack /proc. One sentence
then names all that is missing; later, each would look like something else: a limit, a lost process, or one that cannot
be killed.
"""

from __future__ import annotations

import _socket
import contextlib
import errno
import os
import select
import signal
import sys
from collections.abc import Callable, Collection, Mapping

from rallypoint.base.errors import ResourceError
from rallypoint.base.light_typing import TYPE_CHECKING

if TYPE_CHECKING:
    from socket import socket

    from rallypoint.base.portable import Poller

PLATFORM_VARIABLE = "RALLYPOINT_PLATFORM"
"""`portable` makes Linux count as a system without any of Linux's own calls."""

PORTABLE = sys.platform != "linux" or os.environ.get(PLATFORM_VARIABLE) == "portable"
"""Whether replacements are used for the calls that only Linux has."""

_DENIALS = {errno.EPERM, errno.EACCES, errno.ENOSYS}

_checked = False


def check_kernel() -> None:
    """Check that this process may use the calls that an agent needs. Asks the kernel once.

    Raises:
        ResourceError: it may not; the text names the calls, and what to do.
    """
    global _checked
    if not _checked and not PORTABLE:
        _check({**CALLS, **CALLS_ON_PROCESSES})
        _check_proc()
        _checked = True


def check_for_loop() -> None:
    """The same for what an event loop needs, which otherwise may end this process."""
    if not PORTABLE:
        _check(CALLS)


def _check(calls: Mapping[str, Callable[[], object]]) -> None:
    denied = {name: error for name, call in calls.items() if (error := _refusal(call)) is not None}
    if denied:
        raise denied_error(*denied, why=next(iter(denied.values())))


def denied_error(*calls: str, why: OSError | None = None) -> ResourceError:
    """The error for system calls that are denied or missing."""
    names = f"system call {calls[0]}" if len(calls) == 1 else f"system calls {', '.join(calls[:-1])} and {calls[-1]}"
    reason = f" ({why.strerror})" if why is not None else ""
    return ResourceError(
        f"the {names} cannot be used here{reason}: a sandbox denies it, or the kernel is too old; allow it in the "
        "seccomp profile of the container, or use Linux 5.3 or newer"
    )


def memory_file(name: str) -> int:
    """The descriptor of a new file in memory (`memfd_create`). Raises OSError; a ResourceError if that is denied."""
    try:
        return new_memory_file(name)
    except OSError as error:
        raise denied_error("memfd_create", why=error) if is_denial(error) else error from None


def is_denial(error: OSError) -> bool:
    """Whether a system call without a path was denied, as opposed to failing for lack of a resource."""
    return error.errno in _DENIALS and error.filename is None


def _refusal(call: Callable[[], object]) -> OSError | None:
    """How the call is denied; None if it is not."""
    try:
        call()
    except OSError as error:
        return error if is_denial(error) else None
    return None


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


if sys.platform == "linux" and not PORTABLE:
    from _socket import AF_NETLINK, SO_PEERCRED, SOL_SOCKET, TCP_KEEPIDLE
    from fcntl import F_GETPIPE_SZ, F_SETPIPE_SZ, fcntl
    from os import pidfd_open, sched_getaffinity, sched_setaffinity

    FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    """The flags for opening a folder in order to change to it."""

    def send_signal(descriptor: int, _pid: int, number: int, /) -> None:
        """Send a signal to the process of a descriptor; `_pid` is its pid. Raises OSError."""
        signal.pidfd_send_signal(descriptor, number)

    def exit_of_child(descriptor: int, _pid: int, /) -> int | None:
        """Return a child's exit status, -N for a signal; None while a debugger holds it. Does not reap; OSError."""
        found = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def own_descriptor() -> int:
        """A descriptor that is readable when this process has ended, for use by another one."""
        return pidfd_open(os.getpid())

    def set_pipe_size(fd: int, size: int, /) -> int:
        """Set the capacity of a pipe in bytes, if that is allowed; returns the actual capacity."""
        try:
            return fcntl(fd, F_SETPIPE_SZ, size)
        except OSError:  # more than this user may have
            return fcntl(fd, F_GETPIPE_SZ)

    def wait_for_signal(numbers: Collection[int], seconds: float, /) -> int | None:
        """Take the next of these blocked signals; None if none arrives within this time."""
        received = signal.sigtimedwait(numbers, seconds)
        return None if received is None else received.si_signo

    def new_poller() -> Poller:
        """An object that waits for many descriptors. Raises OSError."""
        return select.epoll()

    def socket_address(name: str, /) -> str:
        """The address of a unix socket of this machine, which disappears when no process has it open; OSError."""
        return f"\0{name}"

    def remove_socket(_address: str | bytes, /) -> None:
        """Remove what is left of a socket that no process has open any more."""

    def socket_names() -> list[str]:
        """The names of all such sockets, in order. Raises OSError."""
        with open("/proc/net/unix", errors="replace") as table:
            found = {line.rstrip().rpartition(" ")[2] for line in table}
        return sorted(each[1:] for each in found if each.startswith("@"))

    def uid_of_peer(connected: socket, /) -> int:
        """The user id of the peer of such a socket. Raises OSError."""
        credentials = connected.getsockopt(SOL_SOCKET, SO_PEERCRED, 12)
        return int.from_bytes(credentials[4:8], sys.byteorder)

    def wakeup_pair() -> tuple[int, int]:
        """The descriptors of a `Wakeup` for reading and for writing, which may be the same. Raises OSError."""
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return fd, fd

    def new_memory_file(name: str, /) -> int:
        """Like `memory_file`. Raises OSError."""
        return os.memfd_create(name, os.MFD_CLOEXEC)

    CALLS: dict[str, Callable[[], object]] = {
        "eventfd2": lambda: os.close(os.eventfd(0)),
        "epoll_create1": lambda: select.epoll().close(),
        "pipe2": lambda: _close(*os.pipe2(os.O_CLOEXEC)),
        "socketpair": lambda: _close(*(end.detach() for end in _socket.socketpair())),
    }
    """The calls that an event loop needs too."""

    CALLS_ON_PROCESSES: dict[str, Callable[[], object]] = {
        "pidfd_open": lambda: os.close(os.pidfd_open(os.getpid())),
        "pidfd_send_signal": lambda: signal.pidfd_send_signal(-1, 0),  # there is no such descriptor
    }
else:
    from rallypoint.base.portable import (
        AF_NETLINK,
        CALLS,
        CALLS_ON_PROCESSES,
        FOLDER,
        TCP_KEEPIDLE,
        exit_of_child,
        new_memory_file,
        new_poller,
        own_descriptor,
        pidfd_open,
        remove_socket,
        sched_getaffinity,
        sched_setaffinity,
        send_signal,
        set_pipe_size,
        socket_address,
        socket_names,
        uid_of_peer,
        wait_for_signal,
        wakeup_pair,
    )

__all__ = [
    "AF_NETLINK",
    "FOLDER",
    "TCP_KEEPIDLE",
    "exit_of_child",
    "new_poller",
    "own_descriptor",
    "pidfd_open",
    "remove_socket",
    "sched_getaffinity",
    "sched_setaffinity",
    "send_signal",
    "set_pipe_size",
    "socket_address",
    "socket_names",
    "uid_of_peer",
    "wait_for_signal",
]
"""The calls that this module exports, besides its own definitions."""


class Wakeup:
    """Lets any thread, or a signal handler, wake a thread that waits until `fileno` is readable.

    Raises:
        OSError: there are no descriptors left.
    """

    __slots__ = ("_fd", "_writing")

    def __init__(self) -> None:
        self._fd, self._writing = wakeup_pair()

    def fileno(self) -> int:
        """Readable from `set` until `clear`; -1 once it is closed."""
        return self._fd

    def set(self) -> None:
        """Make it readable."""
        with contextlib.suppress(BlockingIOError):  # it is
            os.write(self._writing, _ONE)

    def clear(self) -> None:
        """Make it unreadable until the next `set`."""
        with contextlib.suppress(BlockingIOError):  # it is
            os.read(self._fd, 4096)

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        fd, writing, self._fd, self._writing = self._fd, self._writing, -1, -1
        for each in {fd, writing} - {-1}:
            os.close(each)


_ONE = (1).to_bytes(8, sys.byteorder)
"""The value that is written to an eventfd."""


def _check_proc() -> None:
    try:
        known = os.readlink("/proc/self")
    except OSError as error:
        raise ResourceError(
            f"/proc cannot be read ({error.strerror}), which is needed to find what workers leave running; mount "
            "it (`mount -t proc proc /proc`)"
        ) from None
    if known != str(os.getpid()):
        raise ResourceError(
            f"/proc is that of another PID namespace (it calls this process {known}, which is {os.getpid()} here), so "
            "what workers leave running would be taken for other processes; mount one of this namespace "
            "(`mount -t proc proc /proc`, or `unshare --mount-proc`)"
        )
