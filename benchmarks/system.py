"""What programs ask of the system, and read of it: descriptors, cores, and the processor time of another process."""

from __future__ import annotations

import os
import resource
import time


def raise_file_limit() -> None:
    """Lift this process's limit of open files to what it may set by itself: a thousand connections need descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def server_core() -> set[int]:
    """The core that is a server's alone: the first that we may use."""
    return {min(os.sched_getaffinity(0))}


def load_cores() -> set[int]:
    """The cores of the load: all others, or the only one there is."""
    cores = os.sched_getaffinity(0)
    return cores - server_core() or cores


class ProcessClock:
    """The processor time that all threads of one process have used so far.

    Args:
        pid: a process of this machine.

    Raises:
        OSError: there is none of that number.
    """

    def __init__(self, pid: int) -> None:
        import ctypes  # not in a server whose memory is measured

        clock = ctypes.c_int()
        error = ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock))
        if error:
            raise OSError(error, f"the processor time of process {pid} cannot be read: {os.strerror(error)}")
        self.id = clock.value
        """What the system calls this clock."""

    def seconds(self) -> float:
        """User and system time, all threads together."""
        return time.clock_gettime(self.id)
