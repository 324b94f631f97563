"""Which failures count as the same, and what ends a streak of failures. Pure; imported with the first failure."""

from __future__ import annotations

from rallypoint.failures.cause import Cause
from rallypoint.membership.state import FailureStreak, Settings, State

_MAX_LINE = 512
"""Characters of a traceback's last line by which a failure is identified."""


def failure_streak_after(state: State, cause: Cause, ran: float | None, settings: Settings) -> FailureStreak:
    """The streak after `cause` has ended the running round; progress ends it.

    Args:
        state: the state before that.
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
    """Whether the running round made more progress than any before; without reports of it, whether it ran for long."""
    if state.progress.reported:
        return state.progress.round == state.round
    return ran is not None and ran >= settings.min_healthy_time


def _last_line(cause: Cause) -> str:
    if cause.exitcode < 0:
        return f"signal {-cause.exitcode}"  # the message of such a death may name the process, which differs each time
    lines = (cause.traceback or cause.message).rstrip().splitlines()
    return lines[-1].strip()[:_MAX_LINE] if lines else ""
