"""Creates handles of processes, with pidfds if available, otherwise with `base.without_pidfds`."""

from __future__ import annotations

import os
from collections.abc import Callable

from rallypoint.base.kernel import above_standard, readable
from rallypoint.base.pidfds import HAS_PIDFDS
from rallypoint.base.process_handle import ProcessHandle


def child_handle(pid: int, fd: int, send: Callable[[int, int], bool]) -> ProcessHandle:
    """The handle of a child of the reaper.

    Args:
        pid: the process.
        fd: the descriptor received from the reaper; the handle closes it.
        send: asks the reaper to send a signal to that pid; returns False if the reaper is lost.
    """
    if HAS_PIDFDS:
        return ProcessHandle(pid, fd)
    from rallypoint.base.process_table import read_stat
    from rallypoint.base.without_pidfds import CheckedHandle

    stat = read_stat(pid)
    # Check after reading: if the worker has ended by now, `stat` may describe another process with its pid.
    return CheckedHandle(pid, fd, None if readable(fd) else stat, send)


def open_process(pid: int) -> ProcessHandle:
    """The handle of any process.

    Raises:
        ProcessLookupError: no such process exists.
        OSError: no descriptor is free, or no thread can be started to watch the process.
    """
    if HAS_PIDFDS:
        return ProcessHandle(pid, above_standard(os.pidfd_open(pid)))
    from rallypoint.base.process_table import read_stat
    from rallypoint.base.without_pidfds import CheckedHandle, exit_fd

    stat = read_stat(pid)
    return CheckedHandle(pid, exit_fd(pid), stat)
