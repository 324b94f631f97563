"""`WorkersStop`: the one owner of the stop of this node's workers, a source that yields one event. Cheap to import.

Laws:

1. Nothing else calls `Stop.step` while the loop runs, because it reports its end once, to its caller:

       1. the loop calls us, the stop is not complete, and a worker ends;
       2. a second owner calls `step`, which completes the stop. Nothing is readable any more, and nothing is due;
       3. so the loop calls us only when another source's timer fires, seconds later.

2. One `WorkersStopped` follows each `begin`, when no worker is in the round. Workers that wait for the next round are
   watched until another round's context takes them. One that ends meanwhile is swept without another event.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from rallypoint.agent.sources import Source
from rallypoint.agent.steps import WorkersStopped
from rallypoint.base.light_typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rallypoint.workers.stop import Stop


class WorkersStop(Source):
    """Drives one stop after another.

    Args:
        stopped: called when no worker is left in the round; returns the event for that.
    """

    def __init__(self, stopped: Callable[[], WorkersStopped]) -> None:
        self._stopped = stopped
        self._stop: Stop | None = None
        self.in_progress = False
        """Whether a stop began and some workers are still in the round."""

    def begin(self, stop: Stop | None) -> WorkersStopped | None:
        """Drive this stop from now on; None if no worker ever ran.

        Returns:
            The event if no worker is left in the round; otherwise the event follows later.
        """
        self._stop, self.in_progress = stop, True
        return next(self.step(), None)

    def kill_now(self) -> None:
        """End the grace period of the workers that are being stopped."""
        if self._stop is not None and self.in_progress:
            self._stop.kill_now()

    # Interface to the loop

    def fds(self) -> list[int]:
        return [] if self._stop is None else self._stop.fds()

    def wake_at(self) -> float:
        return math.inf if self._stop is None else self._stop.wake_at()

    def step(self) -> Iterator[WorkersStopped]:
        stop = self._stop
        done = stop is None or stop.step()
        if done and (stop is None or not stop.held):
            self._stop = None
        if done and self.in_progress:
            self.in_progress = False
            yield self._stopped()
