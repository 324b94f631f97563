"""What the kernel says of processes under /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The first fields of /proc/<pid>/stat (proc(5)) that we use."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    started: int
    """Clock ticks after boot: with the pid, it names one process for ever."""


def read_stat(pid: int) -> ProcessStat | None:
    """The process's line, or None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name stands in parentheses and may itself hold spaces and parentheses: split after the last one.
    fields = line[line.rindex(b")") + 2 :].split()
    return ProcessStat(pid, fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def all_pids() -> list[int]:
    """Every process that /proc shows at this moment."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
