"""Asks the machine why a worker failed, beyond its exit code or signal."""

from __future__ import annotations

import os
import signal
from functools import partial

from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.failures.failure import NO_FILE
from rallypoint.failures.out_of_memory import megabytes

if TYPE_CHECKING:
    from rallypoint.failures.failure import ProcessFailure
    from rallypoint.failures.out_of_memory import OomKills

SHARED_MEMORY = "/dev/shm"
_FULL = 0.05
"""The free part of shared memory below which it counts as full: allocations there are large."""


def explain_signal(failure: ProcessFailure, kills: OomKills | None = None, killed: int = 1) -> None:
    """Set the reason of a failure by a signal, if it is known; else add what may be related to its context.

    The kernel's log is only read by the failure's `settle`.

    Args:
        failure: the worker's; the exception in an error file is not overridden.
        kills: counts kills by the out-of-memory killer since the worker's start.
        killed: workers that have died since then of a SIGKILL that was not ours.
    """
    if failure.exitcode != -signal.SIGKILL and kills is not None:
        failure.context = "\n".join(filter(None, (failure.context, kills.context())))
    if failure.error_file != NO_FILE:
        return
    why, text = "", failure.text
    if failure.exitcode == -signal.SIGKILL and kills is not None:
        why = kills.reason(failure.pid, killed)
    elif failure.exitcode == -signal.SIGBUS:
        why = bus_error(SHARED_MEMORY)
    if why:
        failure.set_reason(f"{text}: {why}")
        if kills is not None and failure.exitcode == -signal.SIGKILL:
            failure.look_closer = partial(_by_kernel_log, text, kills, failure.pid)


def _by_kernel_log(text: str, kills: OomKills, pid: int) -> str | None:
    why = kills.reason_by_log(pid)
    return f"{text}: {why}" if why else why if why is None else text


def bus_error(shared: str) -> str:
    """The likely cause of a SIGBUS; `shared` is the folder of shared memory."""
    meaning = "it accessed mapped memory with nothing behind it, as of a mapped file that was truncated"
    try:
        disk = os.statvfs(shared)
    except OSError:
        return meaning
    total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    if not total:  # not a file system of its own
        return meaning
    figures = f"{megabytes(free)} of {megabytes(total)} free"
    if free < total * _FULL:
        remedy = "make it larger (`--shm-size` of a container), or use less of it"
        return f"{shared} is nearly full ({figures}); {remedy}"
    return f"{meaning}, or shared memory ran out ({shared}: {figures} now)"
