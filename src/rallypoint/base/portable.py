"""Replacements for the system calls that only Linux has, on systems without them; `base/kernel` chooses.

Imported there only, or with `RALLYPOINT_PLATFORM=portable`, with which tests run all of this on Linux too. The one
exception is `_kqueue`, which Linux cannot run: it is kept close to the example of kqueue(2).

Laws:

1. Each function does what its namesake does, as far as it is needed here, and raises what that raises.
2. `LACKS` says what is missing.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any, Protocol

from rallypoint.base.private_files import make_private

LACKS = (
    "what leaves a worker's process group, as a daemon does, outlives it; so do workers whose agent and reaper are "
    "killed at once; --preload and in-process recovery have no effect; and nothing is known of memory, open files and "
    "the kernel's view of workers"
)
"""The features that a job on such a system lacks. The long form is in docs/how-to/macos.md."""


def lacks() -> str:
    """One line for users who run a job here."""
    return f"this is {system_name()}, where Rallypoint is for development: {LACKS} (docs/how-to/macos.md)"


def system_name() -> str:
    """The readable name of this system."""
    return {"darwin": "macOS", "linux": "Linux without its own system calls"}.get(sys.platform, sys.platform)


POLL_INTERVAL = 0.05
"""Seconds between two looks at a process that is not our child, if there is no kqueue."""

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
TCP_KEEPIDLE = int(getattr(socket, "TCP_KEEPALIVE", 0) or getattr(socket, "TCP_KEEPIDLE", 4))
"""On macOS it has the first name."""
AF_NETLINK = 255
"""Not a valid family: a socket of it is refused."""
CALLS: dict[str, Callable[[], object]] = {}
CALLS_ON_PROCESSES: dict[str, Callable[[], object]] = {}
"""Empty: no call here can be denied."""
_PIPE_SIZE = 64 * 1024


class Poller(Protocol):
    """The used part of an epoll object; events are those of poll(2), whose numbers epoll shares."""

    def register(self, fd: Any, eventmask: int = ..., /) -> None: ...

    def modify(self, fd: Any, eventmask: int, /) -> None: ...

    def unregister(self, fd: Any, /) -> None: ...

    def poll(self, timeout: float | None = None, maxevents: int = -1) -> list[tuple[int, int]]: ...

    def close(self) -> None: ...


class _PollPoller:
    """An epoll object based on poll(2), whose cost grows with the descriptors. Used by one thread."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self.register = self._poll.register
        self.unregister = self._poll.unregister
        self.modify = self._poll.modify

    def poll(self, timeout: float | None = None, maxevents: int = -1) -> list[tuple[int, int]]:
        """Like epoll's: `timeout` is in seconds."""
        found = self._poll.poll(None if timeout is None or timeout < 0 else timeout * 1000)
        return found[:maxevents] if maxevents > 0 else found

    def close(self) -> None:
        """Do nothing: it holds no resources."""


def new_poller() -> Poller:
    """Replaces `select.epoll`."""
    return _PollPoller()


def wakeup_pair() -> tuple[int, int]:
    """Replaces an eventfd: the descriptors for reading and for writing."""
    ends = os.pipe()
    for fd in ends:
        os.set_blocking(fd, False)
    return ends


def new_memory_file(_name: str, /) -> int:
    """Replaces `os.memfd_create`: a file without a name."""
    fd, path = tempfile.mkstemp()
    os.unlink(path)
    return fd


def set_pipe_size(_fd: int, _size: int, /) -> int:
    """Do nothing: a pipe has the system's size."""
    return _PIPE_SIZE


def sched_getaffinity(_pid: int, /) -> set[int]:
    """All processors: processes are never bound."""
    return set(range(os.cpu_count() or 1))


def sched_setaffinity(_pid: int, _cpus: Iterable[int], /) -> None:
    """Raise OSError: processes cannot be bound."""
    raise OSError(errno.ENOTSUP, "processes cannot be bound to processors on this system")


# Sockets by which commands find the agents of this machine


SOCKETS = "/tmp/rallypoint-"
"""The prefix of the folder's name. macOS' folders of temporary files are too long for the address of a socket."""


def socket_address(name: str, /) -> str:
    """A path in a folder of this user, which is made. Raises OSError, PermissionError if it belongs to another user."""
    return os.path.join(_socket_folder(), name.replace("/", ":"))


def socket_names() -> list[str]:
    """See `base.kernel`; only those of this user."""
    try:
        return sorted(name.replace(":", "/") for name in os.listdir(f"{SOCKETS}{os.getuid()}"))
    except FileNotFoundError:
        return []


def remove_socket(address: str | bytes, /) -> None:
    """See `base.kernel`."""
    for remove, path in ((os.unlink, address), (os.rmdir, os.path.dirname(address))):  # the folder, after the last one
        with suppress(OSError):
            remove(path)


def uid_of_peer(_connected: socket.socket, /) -> int:
    """This user: no other has access to the folder."""
    return os.getuid()


def _socket_folder() -> str:
    path = f"{SOCKETS}{os.getuid()}"
    make_private(path)
    return path


# Processes

_held: list[int] = []
"""Ends of pipes that the system closes when this process ends, and only then."""


def own_descriptor() -> int:
    """Readable when this process has ended: the system then closes the other end."""
    reading, writing = os.pipe()
    _held.append(writing)
    return reading


def _release_held() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_release_held)


def pidfd_open(pid: int, flags: int = 0) -> int:
    """Readable when a process has ended, with some delay. Raises ProcessLookupError, or OSError."""
    if _has_ended(pid):
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return _exit_descriptor(pid)


if sys.platform == "darwin":

    def _exit_descriptor(pid: int) -> int:
        """The descriptor of a kqueue that reports the end of a process; it can be polled like any other."""
        queue = select.kqueue()
        try:
            end = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
            queue.control([end], 0)
            return os.dup(queue.fileno())
        finally:
            queue.close()

    def _is_ended_child(_pid: int) -> bool:
        return False  # the kqueue tells

    def exit_of_child(_descriptor: int, _pid: int, /) -> int | None:
        """Raise ChildProcessError: the status cannot be read without reaping."""
        raise ChildProcessError(errno.ECHILD, os.strerror(errno.ECHILD))
else:

    def _exit_descriptor(pid: int) -> int:
        """The end of a pipe that a thread closes when it sees that the process has ended."""
        reading, writing = os.pipe()
        threading.Thread(target=_poll_process, args=(pid, writing), name="rallypoint-exit", daemon=True).start()
        return reading

    def _is_ended_child(pid: int) -> bool:
        try:  # a process that has not been reaped still takes signals
            return exit_of_child(-1, pid) is not None
        except ChildProcessError:
            return False

    def exit_of_child(_descriptor: int, pid: int, /) -> int | None:
        """Return the exit status of a child, which stays unreaped. Raises ChildProcessError."""
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _poll_process(pid: int, writing: int) -> None:
    """Close the pipe when the process has ended, or when the pipe has no reader any more."""
    poller = select.poll()
    poller.register(writing, 0)
    while not _has_ended(pid) and not poller.poll(POLL_INTERVAL * 1000):
        pass
    os.close(writing)


def _has_ended(pid: int) -> bool:
    if _is_ended_child(pid):
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's
        return False
    return False


def send_signal(descriptor: int, pid: int, number: int, /) -> None:
    """Send a signal to a process, unless its descriptor shows that it has ended: its pid may then be reused."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    if poller.poll(0):
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    os.kill(pid, number)


def wait_for_signal(numbers: Collection[int], seconds: float, /) -> int | None:
    """Replaces `signal.sigtimedwait`: polls."""
    until = time.monotonic() + seconds
    while not (pending := signal.sigpending().intersection(numbers)):
        if (left := until - time.monotonic()) <= 0:
            return None
        time.sleep(min(left, POLL_INTERVAL))
    return signal.sigwait(pending)


def kill_group(leader: int, number: int = signal.SIGKILL) -> bool:
    """Send a signal to a whole process group; returns whether it has a process that can be signalled."""
    try:
        os.killpg(leader, number)
    except OSError:  # nothing is left of it, or, on macOS, nothing but what has ended
        return False
    return True
