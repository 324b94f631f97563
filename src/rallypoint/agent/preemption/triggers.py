"""What tells one node that its whole job will be taken away: a signal, or the end of the time that Slurm gives it.

How long the workers have to save then:

    after a signal           `notice_timeout` of --rdzv-conf, or 60 s; of a job whose end is known, what is left at most
    before the job's end     all that is left, or `notice_timeout` if that is less

Of what is left the stop of the workers takes its part, `--shutdown-timeout` and 5 s more, but never more than half.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable

from rallypoint.agent.steps import PreemptionRequested
from rallypoint.base.clock import Clock
from rallypoint.base.errors import UsageError
from rallypoint.base.light_typing import TYPE_CHECKING, NamedTuple
from rallypoint.base.signals import signal_name, signal_number

if TYPE_CHECKING:
    from rallypoint.agent.preemption.job_deadline import JobDeadline

DEFAULT_NOTICE = 60.0
"""Seconds that workers have after a signal, where `notice_timeout` does not say."""
_MARGIN = 5.0
"""Seconds that the stop of workers may take beyond their grace period: for stacks, sweep, verdict and requeue."""
_NO_REQUESTS = frozenset(
    {
        signal.SIGKILL,
        signal.SIGSTOP,
        signal.SIGCHLD,
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGTRAP,
        signal.SIGSYS,
        signal.SIGABRT,
        signal.SIGPIPE,
    }
)
"""Signals that cannot be handled, or that the kernel sends for reasons of its own."""


class PreemptionSettings(NamedTuple):
    """What makes the whole job end after its workers have saved, and whether it is started again.

    `signals` are the numbers of those that do, `stop_before_end` is how many seconds before the job's end it is done (0
    for never), `requeue` how often Slurm may be asked to start the job again.
    """

    signals: frozenset[int] = frozenset()
    stop_before_end: float = 0.0
    requeue: int = 0

    @property
    def ignored(self) -> frozenset[int]:
        """The signals that workers ignore until they have handlers; by SIGTERM they are stopped."""
        return self.signals - {signal.SIGTERM}


def preempt_signals(names: str) -> frozenset[int]:
    """The numbers of signals that were named with commas between.

    Raises:
        UsageError: one is no signal that can ask for anything.
    """
    numbers: set[int] = set()
    for name in filter(None, map(str.strip, names.split(","))):
        number = signal_number(name)
        if number is None or not name.startswith("SIG"):
            raise UsageError(f"{name!r} is not a signal of this system; name one such as SIGUSR2")
        if number in _NO_REQUESTS:
            raise UsageError(f"{name} cannot ask a job to save; name another, such as SIGUSR2")
        numbers.add(number)
    return frozenset(numbers)


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
        settings: PreemptionSettings,
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
