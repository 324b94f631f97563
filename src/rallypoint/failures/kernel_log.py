"""Whom the out-of-memory killer killed, out of the kernel's log, for those who may read it."""

from __future__ import annotations

import os
import re

_KILLED = re.compile(rb"Killed process (\d+) .*?anon-rss:(\d+)kB, file-rss:\d+kB, shmem-rss:(\d+)kB")
_FIRST_NAMESPACE = 0xEFFFFFFC
"""The number by which the kernel knows the pid namespace that the pids in its log are of."""


def killed_for_memory(log: str = "/dev/kmsg", namespace: str = "/proc/self/ns/pid") -> dict[int, int] | None:
    """Pid to the bytes that it held, of all whom the log tells of; None if it cannot be read, or has other pids."""
    try:
        if os.stat(namespace).st_ino != _FIRST_NAMESPACE:
            return None
        fd = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return {int(pid): (int(own) + int(shared)) * 1024 for pid, own, shared in _KILLED.findall(_all(fd))}
    except OSError:
        return None
    finally:
        os.close(fd)


def _all(fd: int) -> bytes:
    """Every entry that the log holds; a read gives one."""
    entries = []
    while True:
        try:
            entry = os.read(fd, 8192)
        except BlockingIOError:
            break
        except BrokenPipeError:  # it was overwritten before we came to it
            continue
        if not entry:
            break
        entries.append(entry)
    return b"".join(entries)
