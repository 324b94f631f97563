"""What stands in for the calls that only Linux has, on systems without them; `base/kernel` chooses.

Imported there only, or with `RALLYPOINT_PLATFORM=portable`, by which tests have all of this run on Linux too. The one
exception is `_kqueue`, which no Linux can run: it is kept to what kqueue(2) shows as its example.

Laws:

1. Each function does what its namesake does, as far as anybody here needs it, and raises what that raises.
2. What this lacks is said in `LACKS`.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any, Protocol

LACKS = (
    "what leaves a worker's process group, as a daemon does, outlives it; so do workers whose agent and reaper are "
    "killed at once; --preload and in-process recovery have no effect; and nothing is known of memory, open files and "
    "the kernel's view of workers"
)
"""What a job on such a system does without. Its long form is in docs/how-to/macos.md."""


def lacks() -> str:
    """One line for whoever runs a job here."""
    return f"this is {system_name()}, where Rallypoint is for development: {LACKS} (docs/how-to/macos.md)"


def system_name() -> str:
    """What this is, for people."""
    return {"darwin": "macOS", "linux": "Linux without its own system calls"}.get(sys.platform, sys.platform)


POLL_INTERVAL = 0.05
"""Seconds between two looks at a process that is not ours to wait for, where there is no kqueue."""

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
TCP_KEEPIDLE = int(getattr(socket, "TCP_KEEPALIVE", 0) or getattr(socket, "TCP_KEEPIDLE", 4))
"""macOS calls it by the first name."""
AF_NETLINK = 255
"""No family: a socket of it is refused."""
CALLS: dict[str, Callable[[], object]] = {}
CALLS_ON_PROCESSES: dict[str, Callable[[], object]] = {}
"""Nothing is called that could be denied."""
_PIPE_SIZE = 64 * 1024


class Poller(Protocol):
    """What is used of an epoll object; events are those of poll(2), whose numbers epoll shares."""

    def register(self, fd: Any, eventmask: int = ..., /) -> None: ...

    def modify(self, fd: Any, eventmask: int, /) -> None: ...

    def unregister(self, fd: Any, /) -> None: ...

    def poll(self, timeout: float | None = None, maxevents: int = -1) -> list[tuple[int, int]]: ...

    def close(self) -> None: ...


class _PollPoller:
    """An epoll object made of poll(2), whose costs grow with the descriptors. Used by one thread."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self.register = self._poll.register
        self.unregister = self._poll.unregister
        self.modify = self._poll.modify

    def poll(self, timeout: float | None = None, maxevents: int = -1) -> list[tuple[int, int]]:
        """As epoll's: `timeout` is in seconds."""
        found = self._poll.poll(None if timeout is None or timeout < 0 else timeout * 1000)
        return found[:maxevents] if maxevents > 0 else found

    def close(self) -> None:
        """Nothing is held."""


def new_poller() -> Poller:
    """For `select.epoll`."""
    return _PollPoller()


def wakeup_pair() -> tuple[int, int]:
    """For an eventfd: what is read, and what is written."""
    ends = os.pipe()
    for fd in ends:
        os.set_blocking(fd, False)
    return ends


def new_memory_file(_name: str, /) -> int:
    """For `os.memfd_create`: a file without a name."""
    fd, path = tempfile.mkstemp()
    os.unlink(path)
    return fd


def set_pipe_size(_fd: int, _size: int, /) -> int:
    """A pipe is as large as the system makes it."""
    return _PIPE_SIZE


def sched_getaffinity(_pid: int, /) -> set[int]:
    """All processors: nobody is bound."""
    return set(range(os.cpu_count() or 1))


def sched_setaffinity(_pid: int, _cpus: Iterable[int], /) -> None:
    """Raises OSError: nobody can be bound."""
    raise OSError(errno.ENOTSUP, "processes cannot be bound to processors on this system")


# Sockets by which commands find the agents of this machine


SOCKETS = "/tmp/rallypoint-"
"""What the folder's name begins with. The address of a socket has no room for macOS' folders of temporary files."""


def socket_address(name: str, /) -> str:
    """A path in a folder of this user's; it is made. Raises OSError, PermissionError if it is somebody else's."""
    return os.path.join(_socket_folder(), name.replace("/", ":"))


def socket_names() -> list[str]:
    """See `base.kernel`; those of this user."""
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
    """Nobody else comes into the folder."""
    return os.getuid()


def _socket_folder() -> str:
    path = f"{SOCKETS}{os.getuid()}"
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(errno.EPERM, f"it is not a folder that only this user can open: {path}")
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
    """Readable when a process has ended, though not in the moment of that. Raises ProcessLookupError, or OSError."""
    if _has_ended(pid):
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return _exit_descriptor(pid)


if sys.platform == "darwin":

    def _exit_descriptor(pid: int) -> int:
        """The descriptor of a kqueue that notes the end of a process; it can be polled, as any other."""
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
        """Nobody can ask without reaping. Raises ChildProcessError."""
        raise ChildProcessError(errno.ECHILD, os.strerror(errno.ECHILD))
else:

    def _exit_descriptor(pid: int) -> int:
        """The end of a pipe that a thread closes when it sees that the process has ended."""
        reading, writing = os.pipe()
        threading.Thread(target=_poll_process, args=(pid, writing), name="rallypoint-exit", daemon=True).start()
        return reading

    def _is_ended_child(pid: int) -> bool:
        try:  # one that nobody has waited for still takes signals
            return exit_of_child(-1, pid) is not None
        except ChildProcessError:
            return False

    def exit_of_child(_descriptor: int, pid: int, /) -> int | None:
        """How a child has ended, which stays unreaped. Raises ChildProcessError."""
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _poll_process(pid: int, writing: int) -> None:
    """Close the pipe when the process has ended, or when nobody reads the pipe any more."""
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
    except OSError:  # somebody else's
        return False
    return False


def send_signal(descriptor: int, pid: int, number: int, /) -> None:
    """Send a signal to a process, unless its descriptor tells that it has ended: its pid may be another's then."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    if poller.poll(0):
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    os.kill(pid, number)


def wait_for_signal(numbers: Collection[int], seconds: float, /) -> int | None:
    """For `signal.sigtimedwait`: looks again and again."""
    until = time.monotonic() + seconds
    while not (pending := signal.sigpending().intersection(numbers)):
        if (left := until - time.monotonic()) <= 0:
            return None
        time.sleep(min(left, POLL_INTERVAL))
    return signal.sigwait(pending)


def kill_group(leader: int, number: int = signal.SIGKILL) -> bool:
    """Send a signal to all of a process group; whether there was anything that can be sent one."""
    try:
        os.killpg(leader, number)
    except OSError:  # nothing is left of it, or, on macOS, nothing but what has ended
        return False
    return True
