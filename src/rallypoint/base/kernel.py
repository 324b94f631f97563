"""The system calls that an agent needs, and an early check that they are allowed.

A sandbox (a container's seccomp profile) may deny system calls, and a root folder may lack /proc. One sentence names
all that is missing. Otherwise each gap would later look like another fault: a limit, a lost process, or one that
cannot be killed. Pidfds are optional (see `base.open_process`). All loops of this program wait in
`until_readable`.
"""

from __future__ import annotations

import _socket
import contextlib
import errno
import os
import select
import sys
from collections.abc import Callable, Iterable, Mapping
from fcntl import F_DUPFD_CLOEXEC, F_GETPIPE_SZ, F_SETPIPE_SZ, fcntl

from rallypoint.base.errors import ResourceError


class DeniedError(ResourceError):
    """A sandbox or the root folder denies a required call. Do not retry."""


_DENIALS = {errno.EPERM, errno.EACCES, errno.ENOSYS}

_checked = False


def check_kernel() -> None:
    """Check, once per process, that the calls that an agent needs are allowed. Raises DeniedError if not; its message
    names the calls and the remedy.
    """
    global _checked
    if not _checked:
        if "gevent.monkey" in sys.modules:
            from rallypoint.base.greenlets import check_threads

            check_threads()
        _check(_CALLS)
        _check_proc()
        _checked = True


def check_for_loop() -> None:
    """Check the calls that an event loop needs: without them, the loop may end this process. Raises DeniedError."""
    if not _checked:
        _check(_CALLS)


def _check(calls: Mapping[str, Callable[[], object]]) -> None:
    denied = {name: error for name, call in calls.items() if (error := _refusal(call)) is not None}
    if denied:
        raise denied_error(*denied, why=next(iter(denied.values())))


def denied_error(*calls: str, why: OSError | None = None) -> DeniedError:
    names = f"system call {calls[0]}" if len(calls) == 1 else f"system calls {', '.join(calls[:-1])} and {calls[-1]}"
    reason = f" ({why.strerror})" if why is not None else ""
    advice = ", or return ENOSYS, as Docker does since 20.10.10" if "clone3" in calls else ""
    return DeniedError(
        f"the {names} cannot be used here{reason}: a sandbox denies access; allow it in the container's seccomp "
        f"profile{advice}"
    )


def memory_file(name: str) -> int:
    """Create a file in memory (`memfd_create`). Returns its descriptor. Raises OSError, or DeniedError if denied."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError as error:
        raise denied_error("memfd_create", why=error) if is_denial(error) else error from None


def is_denial(error: OSError) -> bool:
    """Whether a system call without a path was denied, and did not fail for lack of a resource."""
    return error.errno in _DENIALS and error.filename is None


def _refusal(call: Callable[[], object]) -> OSError | None:
    try:
        call()
    except OSError as error:
        return error if is_denial(error) else None
    return None


def _close(*fds: int) -> None:
    for fd in fds:
        os.close(fd)


_CALLS: dict[str, Callable[[], object]] = {
    "eventfd2": lambda: os.close(os.eventfd(0)),
    "epoll_create1": lambda: select.epoll().close(),
    "pipe2": lambda: _close(*os.pipe2(os.O_CLOEXEC)),
    "socketpair": lambda: _close(*(end.detach() for end in _socket.socketpair())),
}
"""The calls that agents and event loops need."""


def set_pipe_size(fd: int, size: int) -> int:
    """Set the capacity of a pipe in bytes, if allowed. Returns its actual capacity."""
    try:
        return fcntl(fd, F_SETPIPE_SZ, size)
    except OSError:  # more than this user is allowed
        return fcntl(fd, F_GETPIPE_SZ)


class Wakeup:
    """Lets any thread or signal handler wake a thread that waits until `fileno` is readable. Raises OSError if no
    descriptors are left.
    """

    __slots__ = ("_fd",)

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """The descriptor, readable from `set` until `clear`; -1 once closed."""
        return self._fd

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):  # already set
            os.write(self._fd, _ONE)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):  # already clear
            os.read(self._fd, 8)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


_ONE = (1).to_bytes(8, sys.byteorder)
"""The value written to an eventfd."""


def _check_proc() -> None:
    try:
        known = os.readlink("/proc/self")
    except OSError as error:
        raise DeniedError(
            f"/proc cannot be read ({error.strerror}), but it is needed to find processes that workers leave running; "
            "mount it (`mount -t proc proc /proc`)"
        ) from None
    if known != str(os.getpid()):
        raise DeniedError(
            f"/proc belongs to another PID namespace (this process is {known} there and {os.getpid()} here), so "
            "processes that workers leave running would be confused with others; mount /proc for this namespace "
            "(`mount -t proc proc /proc`, or `unshare --mount-proc`)"
        )


_MAX_SECONDS = 86_400.0
"""The kernel stores milliseconds in 31 bits."""


def readable(fd: int, seconds: float = 0.0, events: int = select.POLLIN) -> bool:
    """Whether a descriptor is or becomes readable within this time; without `events`, whether its peer is gone."""
    poller = select.poll()
    poller.register(fd, events)
    return bool(poller.poll(seconds * 1000))


def above_standard(fd: int) -> int:
    """Move this descriptor to a number above 2; returns the new one."""
    if fd > 2:
        return fd
    try:
        return fcntl(fd, F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def always_readable() -> int:
    """Create a descriptor that is always readable, like that of an ended process. Raises OSError."""
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def until_readable(fds: Iterable[int], seconds: float) -> None:
    """Sleep until one of the descriptors is readable, or for this many seconds, at most a day.

    Milliseconds are rounded up, so that anything due within that time is due when this returns.
    """
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    poller.poll(min(max(0.0, seconds), _MAX_SECONDS) * 1000 + 1)
