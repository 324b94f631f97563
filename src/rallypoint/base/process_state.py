"""What a process is at, as one letter (contract section 5.12)."""

from __future__ import annotations

from rallypoint.base.procfs import read_stat


def read_proc_state(pid: int) -> str | None:
    """The letter that the kernel shows for a process (`R`, `S`, `D`, `Z`, ...); None if there is no such process."""
    found = read_stat(pid)
    return None if found is None else found.state


def is_uninterruptible_state(state: str | None) -> bool:
    """Whether a process of that letter waits for a device or a network disk, and cannot be ended meanwhile."""
    return state == "D"
