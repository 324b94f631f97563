"""What counts as the same failure again, and what ends a streak of failures. Pure; imported with the first failure."""

from __future__ import annotations

from rallypoint.failures.cause import Cause
from rallypoint.membership.state import FailureStreak, Settings, State

_MAX_LINE = 512
"""Characters of a traceback's last line by which a failure is known."""


def failure_streak_after(state: State, cause: Cause, ran: float | None, settings: Settings) -> FailureStreak:
    """The streak as it is once `cause` has ended the round that runs; progress ends it.

    Args:
        state: before that.
        cause: the failure.
        ran: seconds since the round was complete; None if that is not known.
        settings: of the job.
    """
    line = _last_line(cause)
    if _made_progress(state, ran, settings):
        return FailureStreak(0, 0, cause.rank, line)
    came_back = (state.failure_streak.rank, state.failure_streak.line) == (cause.rank, line)
    return FailureStreak(
        state.failure_streak.failures + 1, state.failure_streak.repeats + 1 if came_back else 0, cause.rank, line
    )


def _made_progress(state: State, ran: float | None, settings: Settings) -> bool:
    """Whether the round that runs came further than any before; where nobody reports that, whether it ran for long."""
    if state.progress.reported:
        return state.progress.round == state.round
    return ran is not None and ran >= settings.min_healthy_time


def _last_line(cause: Cause) -> str:
    if cause.exitcode < 0:
        return f"signal {-cause.exitcode}"  # what is said of such a death may name the process, another each time
    lines = (cause.traceback or cause.message).rstrip().splitlines()
    return lines[-1].strip()[:_MAX_LINE] if lines else ""
