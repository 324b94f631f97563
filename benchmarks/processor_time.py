"""Processor time of another process, to the nanosecond."""

from __future__ import annotations

import ctypes
import os
import time


class ProcessClock:
    """The processor time that all threads of one process have used so far.

    Args:
        pid: a process of this machine.

    Raises:
        OSError: there is none of that number.
    """

    def __init__(self, pid: int) -> None:
        clock = ctypes.c_int()
        error = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock))
        if error:
            raise OSError(error, f"the processor time of process {pid} cannot be read: {os.strerror(error)}")
        self.id = clock.value
        """What the system calls this clock."""

    def seconds(self) -> float:
        """User and system time, all threads together."""
        return time.clock_gettime(self.id)
