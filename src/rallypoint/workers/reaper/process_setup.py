"""What reaper and supervisor do to themselves before they serve: orphans, signals and descriptors.

Laws:

1. They adopt whatever is orphaned below them, where the kernel lets them, and no signal but SIGKILL ends them.
2. They hold open nothing that is the agent's.
3. Built-in modules only: `os`, `signal` and `socket` would double the time until the reaper is ready.
"""

from __future__ import annotations

import posix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_signal = __import__("_signal")
SIGKILL, SIGPIPE, SIGTERM, SIGCHLD, SIGCONT, SIGXFSZ = 9, 13, 15, 17, 18, 25
_SET_CHILD_SUBREAPER = 36


def signals() -> Any:
    """What `signal` is made of; that makes enums of all its constants, for 4 ms and 1 MB."""
    return _signal


def become_subreaper() -> None:
    """Adopt the orphans below us. Python has no call for it; `ctypes` does it too, for 2 ms more.

    Raises:
        OSError: the kernel is older than 3.4, or a sandbox denies it.
    """
    ctypes = __import__("_ctypes")
    try:
        prctl = ctypes.dlsym(ctypes.dlopen(None, 2), "prctl")
        refused = ctypes.call_function(prctl, (_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
    except AttributeError:  # these names are not public
        refused = __import__("ctypes").CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if refused:
        raise OSError("this kernel has no PR_SET_CHILD_SUBREAPER")


def sigchld_fd() -> int:
    """Block all signals but SIGCHLD; returns a descriptor that is readable after each."""
    signal = signals()
    reading, writing = posix.pipe()
    for fd in (reading, writing):
        posix.set_blocking(fd, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(SIGCHLD, lambda _number, _frame: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, set(signal.valid_signals()) - {SIGCHLD})
    return reading


def close_inherited(kept: set[int]) -> None:
    """Close what the agent had inherited and is none of ours; 0 and 1 lead nowhere, 2 stays, for error messages."""
    # By name: where the kernel has no close_range(2), `closerange` tries every number there could be.
    try:
        numbers = [int(name) for name in posix.listdir("/proc/self/fd")]
    except FileNotFoundError:
        numbers = list(range(3, posix.sysconf("SC_OPEN_MAX")))
    for fd in numbers:
        if fd > 2 and fd not in kept:
            try:  # noqa: SIM105 - contextlib is not built in
                posix.close(fd)
            except OSError:  # the one by which they were listed
                pass
    for target in (0, 1, 2):
        if target == 2 and _is_open(2):
            continue
        null = open_null()
        if null != target:
            posix.dup2(null, target, inheritable=False)
            posix.close(null)


def open_null() -> int:
    """/dev/null; where there is none, the end of a pipe that nobody holds the other end of: nothing comes of either."""
    try:
        return posix.open("/dev/null", posix.O_RDWR)
    except OSError:
        reading, writing = posix.pipe()
        posix.close(writing)
        return reading


def _is_open(fd: int) -> bool:
    try:
        posix.fstat(fd)
    except OSError:
        return False
    return True


def _unlink(path: bytes) -> None:
    try:  # noqa: SIM105 - contextlib is not built in
        posix.unlink(path)
    except OSError:
        pass


def remove(path: bytes, *, whole: bool) -> None:
    """Remove a folder and what is below it: folders as far as they are empty, or everything."""
    try:
        names = posix.listdir(path)
    except NotADirectoryError:  # the watchdog's pipe
        if whole:
            _unlink(path)
        return
    except OSError:
        return
    for name in names:
        inner = path + b"/" + name
        try:
            folder = posix.lstat(inner).st_mode & 0o170000 == 0o040000
            if folder:
                remove(inner, whole=whole)
            elif whole:
                posix.unlink(inner)
        except OSError:
            pass
    try:  # noqa: SIM105 - contextlib is not built in
        posix.rmdir(path)
    except OSError:
        pass
