"""What a server or load program asks of the system before it begins."""

from __future__ import annotations

import os
import resource


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
