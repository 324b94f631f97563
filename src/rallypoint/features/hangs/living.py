"""Finds workers that raised but are still running: logs a line for each, and writes notes for reports.

Only its peers wait for such a worker: it is in a thread that never ends, in atexit, or destroying a process group. A
complete traceback as its last output, or an error file from this start, shows it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

from rallypoint.agent.causes import raised_failure
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger, ranges
from rallypoint.failures.explanation import message_and_traceback
from rallypoint.failures.texts import first_line
from rallypoint.features.console import waiting_for_console

if TYPE_CHECKING:
    from rallypoint.agent.workers import WorkerController
    from rallypoint.workers.context import PContext

log = get_logger(__name__)

_SILENT_FOR = 5.0
"""Seconds after its last output until a worker counts as one that does not end."""
_UNREAD_FOR = 30.0
"""Seconds without a reader until a blocked console is logged."""


def raised(context: PContext, local_rank: int) -> tuple[str, float] | None:
    """The exception that a running worker wrote, and the seconds since then; None without one. Reads files, so do not
    call it on the loop's thread."""
    failure, ago = raised_failure(context, local_rank)
    return None if ago is None or ago < _SILENT_FOR else (first_line(message_and_traceback(failure)[0]), ago)


class RaisedWorkers:
    """Logs each such worker of one round once. Only `begin_round` is for the loop's thread."""

    def __init__(self, workers: WorkerController) -> None:
        self._workers = workers
        self._context: PContext | None = None
        self._told: set[int] = set()
        self._told_of_console = False

    def begin_round(self) -> None:
        """Start with a new round's workers."""
        self._context, self._told = self._workers.pcontext, set()

    def look(self) -> None:
        """Look at the workers once."""
        context, told = self._context, self._told
        if context is None:
            return
        by_rank = self._workers.global_ranks()
        for rank in context.running:
            if rank in told or (found := raised(context, rank)) is None:
                continue
            told.add(rank)
            text, ago = found
            who = by_rank.get(rank, rank)
            log.warning("rank %d wrote a traceback %.0f s ago and is still running: %s", who, ago, text)
            at = time.strftime("%H:%M:%S", time.localtime(time.time() - ago))
            self._workers.remarks[who] = f"rank {who} wrote a traceback at {at} and is still running: {text}"
        self._look_at_console(context)

    def _look_at_console(self, context: PContext) -> None:
        """Log once each time a console blocks, in our own log, which might go elsewhere."""
        blocked = context.console_blocked_for()
        if blocked < _UNREAD_FOR:
            self._told_of_console = False
        elif not self._told_of_console:
            self._told_of_console = True
            waiters = ranges(waiting_for_console(context))
            who = f": the output of local ranks {', '.join(waiters)} is waiting for it" if waiters else ""
            log.warning("nothing has read the console for %.0f s%s", blocked, who)


def notes_of(context: PContext, by_rank: Mapping[int, int], running: Collection[int]) -> Mapping[int, str]:
    """Notes by global rank about ended workers, and about those with these local ranks that should have ended. Not on
    the loop's thread."""
    now = time.monotonic()
    ended = ((by_rank.get(rank), context.ended_at(rank)) for rank in context.exit_codes)
    notes = {rank: f"{max(0.0, now - at):.0f} s ago" for rank, at in ended if rank is not None}
    for rank in context.pids().keys() & running:
        if (found := raised(context, rank)) is not None:
            notes[by_rank[rank]] = f"it wrote a traceback {found[1]:.0f} s ago: {found[0]}"
    waits = set(waiting_for_console(context)) if context.console_blocked_for() else set()
    notes |= {by_rank[rank]: "it is waiting for the console, which nothing reads" for rank in waits}
    return notes
