"""Reads the kernel's log (/dev/kmsg), if that is allowed. Imported only when needed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

PATH = "/dev/kmsg"


class LogEntry(NamedTuple):
    """One entry: its time, in seconds on the monotonic clock of this machine, and its text."""

    moment: float
    text: str


def raw_entries(path: str = PATH) -> list[bytes]:
    """All entries as they are, the oldest first. OSError if it may not be read."""
    entries: list[bytes] = []
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while True:
            try:
                entry = os.read(fd, 8192)  # one entry
            except BrokenPipeError:  # it was overwritten meanwhile
                continue
            if not entry:
                break
            entries.append(entry)
    except BlockingIOError:
        pass
    finally:
        os.close(fd)
    return entries


def log_entries(entries: Iterable[bytes]) -> list[LogEntry]:
    """The entries without priorities and properties: `6,1234,5678901,-;text`, with microseconds in the third place."""
    found = []
    for entry in entries:
        head, _, text = entry.decode(errors="replace").partition(";")
        fields = head.split(",")
        moment = int(fields[2]) / 1e6 if len(fields) > 2 and fields[2].isdigit() else 0.0
        found.append(LogEntry(moment, text.partition("\n")[0]))
    return found
