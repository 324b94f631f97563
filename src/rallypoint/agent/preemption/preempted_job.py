"""What an agent does beside its workers for a job that is preempted: it awaits the verdict and requeues the job."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from rallypoint.agent.options import Preemption
from rallypoint.agent.steps import AwaitVerdict, EndWithVerdict, RequeueJob, VerdictTimedOut
from rallypoint.base.clock import Clock
from rallypoint.base.errors import JobPreempted
from rallypoint.base.light_typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rallypoint.agent.preemption.requeue import SlurmRequeue

_VERDICT_COMES = 5.0
"""Seconds that the verdict may come after the time of the workers. It takes a moment, unless a node or the control
plane was lost meanwhile: then it takes a lease."""


class PreemptedJob:
    """What was begun and is not yet done. Nothing here waits but `error`, at the very end.

    Args:
        settings: what was asked for on this node.
        clock: of the loop.
    """

    def __init__(self, settings: Preemption, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._verdict_by = math.inf
        self._requeue: SlurmRequeue | None = None

    def carry_out(self, step: AwaitVerdict | RequeueJob) -> None:
        """Begin what the step says."""
        if isinstance(step, AwaitVerdict):
            self._verdict_by = self._clock.monotonic() + step.seconds + _VERDICT_COMES
        elif self._settings.requeue:
            from rallypoint.agent.preemption.requeue import SlurmRequeue

            self._requeue = SlurmRequeue(self._settings.requeue, os.environ)

    def wake_at(self) -> float:
        """When the verdict should be there."""
        return self._verdict_by

    def events(self) -> Iterator[VerdictTimedOut]:
        """That the verdict has not come, once."""
        if self._clock.monotonic() >= self._verdict_by:
            self._verdict_by = math.inf
            yield VerdictTimedOut()

    def error(self, step: EndWithVerdict) -> JobPreempted:
        """What the agent ends with."""
        text = f"the job was preempted, since {step.verdict.verdict.detail}"
        if step.saved is not None:
            text += f"; {'all' if step.saved else 'not all'} workers of this node have saved"
        return JobPreempted(text if self._requeue is None else f"{text}; {self._requeue.finish()}")
