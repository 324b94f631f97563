"""Which of the failures on a node is the cause of the others.

Workers A and B are in a collective, and both are ours:

  1. B raises, and begins to end: atexit, threads, tear-down of its process group;
  2. A's collective fails, since B has closed its connection, and A ends first;
  3. were A's failure announced, all would read of a closed connection, and B be stopped before it has written its
     traceback.

So a failure that may be a consequence of another one (`failures.kinds`) waits half a second for an original. Where
nodes have only such failures, all of them wait; the one that has an original announces it at once, which ends the round
for all. An ordinary failure waits for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import ranges
from rallypoint.failures.failure import NO_FILE
from rallypoint.failures.kinds import may_be_consequence
from rallypoint.failures.texts import clean_lines, is_last_traceback

if TYPE_CHECKING:
    from rallypoint.agent.spec import RunResult
    from rallypoint.agent.workers import WorkerController
    from rallypoint.failures.cause import Cause
    from rallypoint.failures.failure import ProcessFailure

_WITHIN, _LOOKS_AGAIN = 0.5, 0.1
"""Seconds for which an original failure is awaited, and between two looks at living workers."""


class CauseSearch:
    """The search on one node, over all its rounds."""

    def __init__(self, workers: WorkerController) -> None:
        self._workers = workers
        self._round, self._until = -1, 0.0

    def step(self, result: RunResult, round_: int, now: float) -> tuple[Cause | None, float]:
        """The cause among the failures of a result and of living workers, or None while an original is awaited; and
        when to look again.
        """
        cause = result.first_cause()
        if not may_be_consequence(cause):
            return cause, now
        result.failures |= self._living_failures()
        cause = result.first_cause()
        if not may_be_consequence(cause):
            return cause, now
        if self._round != round_:
            self._round, self._until = round_, now + _WITHIN
        if now < self._until and self._workers.pcontext is not None and self._workers.pcontext.running:
            return None, min(now + _LOOKS_AGAIN, self._until)
        self._note_clean_ends(result.failures)
        return result.first_cause(), now

    def _living_failures(self) -> dict[int, ProcessFailure]:
        """What workers that have not ended have left of an exception, by global rank: an error file of this start, or a
        traceback as the last that they have written. They have failed, and are ending, or wait for something.
        """
        context, by_rank, found = self._workers.pcontext, self._workers.global_ranks(), dict[int, ProcessFailure]()
        if context is None:
            return found
        for rank in context.running:
            failure, silent_for = context.failure_so_far(rank)
            has_file = failure.error_file != NO_FILE
            if has_file:
                failure.raised_before = max(0.0, time.time() - failure.moment)
            elif is_last_traceback(clean_lines(failure.last_lines)):
                failure.raised_before = max(0.0, silent_for)
                failure.moment -= failure.raised_before
            else:
                continue
            found[by_rank[rank]] = failure
        return found

    def _note_clean_ends(self, failures: Mapping[int, ProcessFailure]) -> None:
        """Add to failures for which there is no original that other workers had ended by then, with success."""
        by_rank = self._workers.global_ranks()
        ended = sorted(
            by_rank[rank] for rank in (() if self._workers.pcontext is None else self._workers.pcontext.succeeded)
        )
        if not ended:
            return
        note = f"{'rank' if len(ended) == 1 else 'ranks'} {', '.join(ranges(ended))} had ended with 0 before"
        for failure in failures.values():
            failure.context = "\n".join(filter(None, (failure.context, note)))
