"""Processes that tests look at and that may end meanwhile: one that has ended is not there, reaped or not."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from rallypoint.base.process_table import descendants, process_table


def below(pid: int) -> list[int]:
    """All processes below one.

    Those that have ended are none of them: the zygote reaps the process between it and a new copy of it
    (`workers/reaper/orphan`) when it comes to it. Others may end before they are looked at.
    """
    return sorted(descendants(pid, {each.pid: each.parent for each in process_table().values() if not each.ended}))


def command_line(pid: int) -> str:
    """The command line of a process, with spaces between its words and one at the end; empty where it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def resident(pid: int | None = None) -> int:
    """Bytes of memory that a process has in use; this one if none is given."""
    pages = Path(f"/proc/{pid or 'self'}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
