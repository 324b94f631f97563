"""What tells one node that its whole job will be taken away: a signal, or the end of the time that Slurm gives it.

How long the workers have to save then:

    after a signal           `notice_timeout` of --rdzv-conf, or 60 s; of a job whose end is known, what is left at most
    before the job's end     all that is left, or `notice_timeout` if that is less

Of what is left the stop of the workers takes its part, `--shutdown-timeout` and 5 s more, but never more than half.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

from rallypoint.agent.steps import PreemptionRequested
from rallypoint.base.clock import Clock
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.signals import signal_name

if TYPE_CHECKING:
    from rallypoint.agent.options import Preemption
    from rallypoint.agent.preemption.job_deadline import JobDeadline

DEFAULT_NOTICE = 60.0
"""Seconds that workers have after a signal, where `notice_timeout` does not say."""
_MARGIN = 5.0
"""Seconds that the stop of workers may take beyond their grace period: for stacks, sweep, verdict and requeue."""


class PreemptionTriggers:
    """What watches for the preemption of one node's job.

    Args:
        settings: what is asked for.
        notice_timeout: seconds that workers have where they are given notice; 0 where nobody has said.
        stop: seconds between the signal that stops workers and SIGKILL.
        leads: whether this node is the one that looks at the job's end.
        post: takes the event, when that is near.
        clock: of the loop.
    """

    def __init__(
        self,
        settings: Preemption,
        notice_timeout: float,
        stop: float,
        leads: Callable[[], bool],
        post: Callable[[PreemptionRequested], None],
        clock: Clock,
    ) -> None:
        self.signals = settings.signals
        self._notice_timeout = notice_timeout
        self._stop = stop + _MARGIN
        self.deadline: JobDeadline | None = None
        if settings.stop_before_end:
            from rallypoint.agent.preemption.job_deadline import JobDeadline

            self.deadline = JobDeadline(settings.stop_before_end, self._notice, leads, post, os.environ, clock)

    def of_signal(self, number: int) -> PreemptionRequested:
        """What it means that one of the signals has come."""
        seconds = self._notice_timeout or DEFAULT_NOTICE
        if (left := self._time_left()) < math.inf:
            seconds = min(seconds, self._notice(left))
        return PreemptionRequested(seconds, f"received {signal_name(number)}")

    def _time_left(self) -> float:
        """Seconds until the job's end, where the environment says when that is; else infinite."""
        if not os.environ.get("SLURM_JOB_END_TIME"):
            return math.inf
        from rallypoint.agent.preemption.job_deadline import end_time

        now = time.time()
        end = end_time(os.environ, now)
        return math.inf if end is None or end <= now else end - now

    def _notice(self, left: float) -> float:
        seconds = round(max(0.0, left - min(self._stop, left / 2)), 1)
        return min(seconds, self._notice_timeout or math.inf)
