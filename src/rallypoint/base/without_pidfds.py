"""Handles of processes without pidfds (Linux before 5.3, sandboxes that deny them). Imported only if needed.

The reaper waits until a worker ends, and then closes a pipe. It also sends the worker's signals, since a pid cannot be
reused before the parent reaps the process. For any other process, a thread waits until it ends.

Drawbacks: the end of a process that is neither the reaper's child nor ours is noticed up to `WATCH_INTERVAL` late. And
a signal can reach another process if the pid is reused in the microseconds after the check in /proc.
"""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from rallypoint.base.kernel import above_standard
from rallypoint.base.process_handle import ProcessHandle
from rallypoint.base.process_table import ProcessStat, parse_stat, read_stat
from rallypoint.base.side_thread import start_thread

WATCH_INTERVAL = 0.02
"""Seconds between checks of a process that is neither our child nor the reaper's."""

FACT = (
    "processes have no pidfds here (Linux before 5.3, or a sandbox): the reaper signals the workers instead; processes "
    f"that workers leave behind are signalled by pid, and their exit may be noticed {WATCH_INTERVAL * 1000:.0f} ms late"
)
REMEDY = "allow pidfd_open and pidfd_send_signal in the container's seccomp profile, or use Linux 5.3 or newer"


class CheckedHandle(ProcessHandle):
    """A process, identified by its pid and start time.

    Args:
        pid: the process.
        fd: becomes readable when the process ends; this object closes it.
        stat: the process in /proc; None if it has ended.
        send: sends a signal to the pid through its parent; returns whether the parent is alive.
    """

    def __init__(
        self, pid: int, fd: int, stat: ProcessStat | None, send: Callable[[int, int], bool] = lambda *_: False
    ) -> None:
        super().__init__(pid, fd)
        self._stat = stat
        self._send = send

    def send_signal(self, number: int) -> None:
        if self._send(self.pid, number):
            return
        now = read_stat(self.pid)
        if now is None or self._stat is None or now.key != self._stat.key:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        os.kill(self.pid, number)

    def outlives_reaper(self) -> bool:
        return self._stat is not None and self._stat.is_running()


def exit_fd(pid: int) -> int:
    """Create a descriptor that becomes readable when a process ends; a thread waits for the process. Raises OSError
    like `open_process`.
    """
    # The open file stays bound to this process: reading fails once another process has the pid.
    try:
        watched = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from None
    try:
        reading, writing = os.pipe()
    except OSError:
        os.close(watched)
        raise
    ends = above_standard(watched), above_standard(writing)
    if start_thread(partial(_watch, pid, *ends), f"rallypoint-process-{pid}") is None:
        for fd in (reading, *ends):
            os.close(fd)
        raise OSError(errno.EAGAIN, "no more threads can be started")
    return above_standard(reading)


def _watch(pid: int, watched: int, writing: int) -> None:
    """Wait until a process ends or its handle is closed; then write into the pipe.

    Closing the pipe is not enough, since a fork of this process also has its writing end.
    """
    try:
        if _is_running(pid, watched):
            with suppress(ChildProcessError):  # not our child, or another thread reaped it
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        closed = select.poll()
        closed.register(writing, 0)
        while _is_running(pid, watched) and not closed.poll(WATCH_INTERVAL * 1000):
            pass
        with suppress(OSError):  # the handle is closed
            os.write(writing, b"\0")
    finally:
        os.close(watched)
        os.close(writing)


def _is_running(pid: int, watched: int) -> bool:
    try:
        stat = parse_stat(pid, os.pread(watched, 1024, 0))
    except ProcessLookupError:
        return False
    return stat is not None and not stat.ended
