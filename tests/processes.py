"""Commands that tests run to their end, and processes that tests watch and that may end meanwhile."""

from __future__ import annotations

import os
import resource
import subprocess
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rallypoint.base.process_table import descendants, process_table


def completed(
    command: Sequence[str | Path], *, check: bool = False, timeout: float = 120.0, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end as `subprocess.run` does, and keep what it says: a failure that is checked tells it."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **more)
    assert done.returncode == 0 or not check, f"{command}: {done.returncode}: {done.stdout}{done.stderr}"
    return done


def below(pid: int) -> list[int]:
    """All processes below one.

    Those that have ended are none of them, reaped or not: the zygote reaps the process between it and a new copy of it
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


@contextmanager
def peak_below(limit: int) -> Iterator[None]:
    """Check that Python allocates less than `limit` bytes in the block."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open nothing in the block."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
