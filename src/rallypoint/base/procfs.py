"""What the kernel says of processes under /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple


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
    """The process's line, or None when there is no such process, or none that this user may look at (`hidepid`)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
    except OSError:
        return None
    # The command name stands in parentheses and may itself hold spaces and parentheses: split after the last one.
    fields = line[line.rindex(b")") + 2 :].split()
    return ProcessStat(pid, fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]))


def all_pids() -> list[int]:
    """Every process that /proc shows at this moment."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


class InheritedSettings(NamedTuple):
    """What this process hands on to those it starts, beside what every child inherits."""

    ignored: frozenset[int]
    """Numbers of the signals that it ignores."""
    umask: int


def inherited_settings() -> InheritedSettings:
    """Which signals this process ignores, and its umask, which cannot be asked for elsewhere without changing it."""
    try:
        fields = _status("self")
        return InheritedSettings(_numbers(fields["SigIgn"]), int(fields["Umask"], 8))
    except (OSError, KeyError, ValueError):  # no /proc, or a kernel before 4.7
        return _read_settings()


def _read_settings() -> InheritedSettings:
    import signal

    umask = os.umask(0o077)
    os.umask(umask)
    ignored = (number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN)
    return InheritedSettings(frozenset(map(int, ignored)), umask)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; False if there is no such process."""
    try:
        return number in _numbers(_status(pid)["SigCgt"])
    except (OSError, KeyError):
        return False


def is_ended_by(pid: int, number: int) -> bool:
    """Whether a signal whose default is to end a process would do so; False if there is no such process."""
    try:
        status = _status(pid)
        return number not in _numbers(status["SigCgt"]) | _numbers(status["SigIgn"])
    except (OSError, KeyError):
        return False


def _status(pid: int | str) -> dict[str, str]:
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}


def _numbers(mask: str) -> frozenset[int]:
    bits = int(mask, 16)
    return frozenset(number for number in range(1, 65) if bits >> (number - 1) & 1)
