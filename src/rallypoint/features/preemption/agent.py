"""Notifies one node that its whole job will be preempted: by a signal, or at the end of its time limit.

Time that workers then have to save:

    after a signal           `notice_timeout` of --rdzv-conf, or 60 s; of a job whose end is known, what is left at most
    before the job's end     all that is left, or `notice_timeout` if that is less

The stop of the workers takes its part of that, `--shutdown-timeout` plus 5 s, but never more than half.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rallypoint.agent.feature import Agent, Feature
from rallypoint.base.signals import signal_name
from rallypoint.features.preemption.deadline import JobDeadline, end_time
from rallypoint.features.preemption.rules import RULES, PreemptionRequested, RequeueJob
from rallypoint.features.preemption.slurm import SlurmRequeue

if TYPE_CHECKING:
    from rallypoint.agent.policy import Rules
    from rallypoint.agent.sources import Source
    from rallypoint.workers.context import ProcessOptions

DEFAULT_NOTICE = 60.0
"""Seconds that workers have after a signal, unless `notice_timeout` is set."""
_MARGIN = 5.0
"""Seconds to stop workers besides their grace period: for stacks, sweep, verdict and requeue."""


class WholeJobPreemption(Feature):
    """Preempts one node's job. A node without these options follows others that have them."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._options = self.workers.group.spec.features.preemption
        self._notice_timeout = self.workers.rendezvous.notice_timeout
        self._stop = self.workers.grace.stop + _MARGIN
        self._deadline: JobDeadline | None = None
        if self._options.stop_before_end:
            self._deadline = JobDeadline(
                self._options.stop_before_end, self.notice, self._leads, agent.post, os.environ, agent.clock
            )

    def sources(self) -> Iterable[Source]:
        return () if self._deadline is None else (self._deadline,)

    def rules(self) -> Rules:
        return RULES

    def steps(self) -> Mapping[type, Callable[[Any], None]]:
        return {RequeueJob: self._requeue}

    def signals(self) -> Mapping[int, Callable[[int], PreemptionRequested]]:
        return dict.fromkeys(self._options.signals, self.of_signal) if self._options.preempt_signals else {}

    def process_options(self, options: ProcessOptions) -> ProcessOptions:
        if not self._options.preempt_signals:
            return options
        return options._replace(ignored_signals={*options.ignored_signals, *self._options.ignored})

    def close(self) -> None:
        if self._deadline is not None:
            self._deadline.close()

    def of_signal(self, number: int) -> PreemptionRequested:
        """The event for one of the signals."""
        seconds, now = self._notice_timeout or DEFAULT_NOTICE, time.time()
        end = end_time(os.environ, now)
        if end is not None and end > now:
            seconds = min(seconds, self.notice(end - now))
        return PreemptionRequested(seconds, f"received {signal_name(number)}")

    def notice(self, left: float) -> float:
        """Seconds that workers have to save when `left` seconds of the job's time remain."""
        seconds = round(max(0.0, left - min(self._stop, left / 2)), 1)
        return min(seconds, self._notice_timeout or math.inf)

    def _leads(self) -> bool:
        """Whether this node watches the job's end."""
        return not self.workers.group.group_rank

    def _requeue(self, _step: RequeueJob) -> None:
        if self._options.requeue:
            self.agent.at_end(SlurmRequeue(self._options.requeue, os.environ).finish)
