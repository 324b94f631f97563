"""Reasons of failures beyond what exit codes say. Imported with the first failure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from signal import SIGKILL

from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.failures.failure import ProcessFailure

if TYPE_CHECKING:
    from rallypoint.watchdog.watchdog import StuckProcess, WorkerMonitor


def add_reasons(
    failures: Iterable[ProcessFailure], watchdog: WorkerMonitor | None, only_forwarded: Callable[[int], bool]
) -> None:
    """Add to each failure what the watchdog did, or that a signal was not meant to end the worker.

    Args:
        failures: the failures according to exit codes.
        watchdog: the watchdog of these workers, if they have one.
        only_forwarded: whether a signal was meant to inform the workers.
    """
    for failure in failures:
        why = "" if watchdog is None else watchdog.expiry_reason(failure.pid)
        if why and not failure.reason.startswith(why):  # it may have been polled before
            failure.set_reason(f"{why} ({failure.text})")
        elif not failure.reason and only_forwarded(-failure.exitcode):
            failure.set_reason(f"{failure.text}, which was meant for the workers; this one has no handler for it")


def stuck_failures(
    stuck: Mapping[int, StuckProcess], pids: Mapping[int, int], by_rank: Mapping[int, int]
) -> dict[int, ProcessFailure]:
    """The failures of workers that are stuck in the kernel, by global rank.

    Args:
        stuck: the watchdog's findings, by process id.
        pids: process ids by local rank.
        by_rank: global ranks by local rank.
    """
    failures = {}
    for local_rank, pid in pids.items():
        if pid in stuck:
            failure = failures[by_rank[local_rank]] = ProcessFailure(local_rank, pid, -SIGKILL, "")
            failure.set_reason(stuck[pid].why)
    return failures
