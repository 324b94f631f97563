"""Failures that come back: how many in a row without progress, and for how long that holds back the next round. Pure.

Beyond torchrun, and off unless asked for (`restart_backoff`, `same_failure_limit`). A round has made progress if it ran
for `min_healthy_time`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rallypoint.failures.cause import Cause
from rallypoint.membership.state import FailureStreak, Settings, State

if TYPE_CHECKING:
    from rallypoint.membership.decisions import ClockView

_LINE = 512
"""Characters of a traceback's last line by which it is known."""


def failure_streak_after(state: State, cause: Cause, view: ClockView, settings: Settings) -> FailureStreak:
    """The streak as it is once `cause` has ended the round that runs."""
    line = _last_line(cause)
    if view.running_at is not None and view.now - view.running_at >= settings.min_healthy_time:
        return FailureStreak(0, 0, cause.rank, line)
    came_back = (state.failure_streak.rank, state.failure_streak.line) == (cause.rank, line)
    return FailureStreak(
        state.failure_streak.failures + 1, state.failure_streak.repeats + 1 if came_back else 0, cause.rank, line
    )


def restart_delay(streak: FailureStreak, settings: Settings) -> float:
    """Seconds for which the round after the streak is held back: none after progress, then twice as long each time."""
    if not settings.restart_backoff or not streak.failures:
        return 0.0
    doublings = min(streak.failures - 1, 64)
    return float(min(settings.restart_backoff * 2**doublings, settings.restart_backoff_max))


def _last_line(cause: Cause) -> str:
    if cause.exitcode < 0:
        return f"signal {-cause.exitcode}"  # what is said of such a death may name the process, another each time
    lines = (cause.traceback or cause.message).rstrip().splitlines()
    return lines[-1].strip()[:_LINE] if lines else ""
