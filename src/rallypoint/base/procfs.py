"""Reads other information about processes and this machine from /proc (proc(5))."""

from __future__ import annotations

import os

from rallypoint.base.light_typing import NamedTuple


def read_text(path: str, most: int = -1) -> str:
    """The first `most` characters of a file; empty if this process cannot read it."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(most)
    except OSError:
        return ""


def local_port_range() -> str:
    """The first and last port that the kernel uses for outgoing connections; empty if unknown."""
    return read_text("/proc/sys/net/ipv4/ip_local_port_range")


def read_proc_state(pid: int) -> str | None:
    """A process's state (`R`, `S`, `D`, `Z`, ...; contract section 5.12); None if no such process exists."""
    from rallypoint.base.process_table import read_stat

    stat = read_stat(pid)
    return None if stat is None else stat.state


def process_user(pid: int) -> int | None:
    """The user id of a process; None if it does not exist or is hidden from this user."""
    try:
        return int(_status(pid)["Uid"].split()[0])
    except (OSError, KeyError, ValueError, IndexError):
        return None


def is_uninterruptible_state(state: str | None) -> bool:
    """Whether a process in this state is waiting for a device or a network disk and cannot be killed meanwhile."""
    return state == "D"


class InheritedSettings(NamedTuple):
    """Settings that children inherit from this process: its ignored signals and its umask."""

    ignored: frozenset[int]
    umask: int


def inherited_settings() -> InheritedSettings:
    """Read the settings from /proc, since other ways to read the umask change it."""
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


def has_signal_handler(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; False if no such process exists."""
    try:
        return number in _numbers(_status(pid)["SigCgt"])
    except (OSError, KeyError):
        return False


def is_ended_by(pid: int, number: int) -> bool:
    """Whether a signal ends a process because it has the default action; False if no such process exists."""
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
