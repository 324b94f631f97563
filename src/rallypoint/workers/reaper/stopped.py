"""Ends a stopped reaper (SIGSTOP, a debugger), which outlives its connection and its supervisor. Imported only when a
reaper does not end by itself."""

from __future__ import annotations

import contextlib
from signal import SIGCONT, SIGKILL

from rallypoint.base.kernel import readable
from rallypoint.base.process_table import descendants, process_table, signal_process


def is_stopped(supervisor: int) -> bool:
    """Whether the reaper of this supervisor, or the supervisor itself, is stopped."""
    with contextlib.suppress(OSError):
        return any(
            stat.state in "Tt" and supervisor in (pid, stat.parent) and stat.session == supervisor
            for pid, stat in process_table().items()
        )
    return False


def kill(supervisor: int, ended: int, seconds: float) -> None:
    """Kill the reaper. Its supervisor, which might also be stopped, then kills everything left below.

    Args:
        supervisor: its pid.
        ended: a descriptor that becomes readable when the supervisor ends.
        seconds: how long to wait for each kill.
    """
    with contextlib.suppress(OSError):
        table = process_table()
        own = table.get(supervisor)
        if own is None or readable(ended):  # another process might have its pid
            return
        below = descendants(supervisor, {pid: stat.parent for pid, stat in table.items()})
        signal_process(own, SIGCONT)
        for victims in ([pid for pid in below if table[pid].parent == supervisor], below):
            for pid in victims:
                signal_process(table[pid], SIGKILL)
            if readable(ended, seconds):
                return
        signal_process(own, SIGKILL)
