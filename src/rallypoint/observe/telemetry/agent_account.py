"""What an agent counts of its own events while somebody may ask for metrics. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate

from rallypoint.base.light_typing import NamedTuple
from rallypoint.observe.telemetry import agent_events as events
from rallypoint.observe.telemetry.agent_events import NodePhase, PhaseClock

RECOVERY_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Seconds; the bounds of the histogram of recoveries."""
_FAILURES = ("failure", "lost")
"""Reasons for the end of a round after which the time to recover counts."""


class AgentReading(NamedTuple):
    """What an agent has counted. `recoveries` are cumulative, by `RECOVERY_BOUNDS` and infinity."""

    phase: NodePhase
    seconds: Mapping[NodePhase, float]
    round: int
    rounds: int
    group_rank: int
    restarts: Mapping[str, int]
    failures: Mapping[str, int]
    recoveries: tuple[int, ...]
    recovery_seconds: float
    step: int
    progress_at: float
    """When the last progress was made, in epoch seconds; 0 where there was none."""
    hangs: int = 0
    survived: int = 0
    """How often a worker has gone on in its process when a round had ended."""


class AgentAccount:
    def __init__(self) -> None:
        self._clock = PhaseClock(0.0)
        self._round = -1
        self._rounds = 0
        self._group_rank = -1
        self._restarts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._recoveries = [0] * (len(RECOVERY_BOUNDS) + 1)
        self._recovery_seconds = 0.0
        self._failed_at: float | None = None
        """When the failure was seen from which there was no recovery yet."""
        self._step = -1
        self._progress_at = 0.0
        self._hangs = 0
        self._survived = 0

    def take(self, event: events.AgentEvent) -> None:
        match event:
            case events.PhaseBegan():
                self._clock.enter(event.phase, event.elapsed, event.seconds)
            case events.RoundStarted():
                self._round, self._group_rank = event.round, event.group_rank
                self._rounds += 1
            case events.WorkerFailed(failure=failure):
                self._failures[failure_kind(failure.exit_code)] += 1
                self._saw_failure(event.elapsed)
            case events.RoundOver():
                self._restarts[event.reason] += 1
                self._group_rank = -1
                if event.reason in _FAILURES:
                    self._saw_failure(event.elapsed)
            case events.WorkersStarted():
                self._recovered(event.elapsed)
                self._survived += len(event.survived)
            case events.ProgressMade():
                self._step = max(self._step, event.step)
                self._progress_at = event.time - event.age
            case events.HangReported():
                self._hangs += 1
            case _:
                pass

    def read(self, elapsed: float) -> AgentReading:
        """What was counted until so many seconds after the agent's begin."""
        return AgentReading(
            self._clock.phase,
            self._clock.seconds(elapsed),
            self._round,
            self._rounds,
            self._group_rank,
            dict(self._restarts),
            dict(self._failures),
            tuple(accumulate(self._recoveries)),
            self._recovery_seconds,
            self._step,
            self._progress_at,
            self._hangs,
            self._survived,
        )

    def _saw_failure(self, elapsed: float) -> None:
        if self._failed_at is None:
            self._failed_at = elapsed

    def _recovered(self, elapsed: float) -> None:
        if self._failed_at is not None:
            seconds = max(0.0, elapsed - self._failed_at)
            self._recoveries[bisect_left(RECOVERY_BOUNDS, seconds)] += 1
            self._recovery_seconds += seconds
            self._failed_at = None


def failure_kind(exit_code: int) -> str:
    """The signal that has ended a worker, as SIGKILL; `exit_code` where none has."""
    if exit_code >= 0:
        return "exit_code"
    from rallypoint.base.signals import signal_name

    return signal_name(-exit_code)
