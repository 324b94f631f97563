"""Drives what takes time to end on this node: the user's check of it, and a stop of its workers.

Imported with the first of the two. Nothing here waits: the loop sleeps on `fds` until `wake_at` and asks for `events`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from rallypoint.agent.controller import WorkerController
from rallypoint.agent.steps import Event, StopWorkers, WorkersStopped
from rallypoint.base.light_typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rallypoint.agent.node_check import NodeCheck
    from rallypoint.workers.stop import StopInProgress


class Stopping:
    """The check and the stop of one agent.

    Args:
        workers: the workers of this node.
        stopped: called when they are gone, for the event that says so.
    """

    def __init__(self, workers: WorkerController, stopped: Callable[[], WorkersStopped]) -> None:
        self._workers = workers
        self._stopped = stopped
        self.stop: StopInProgress | None = None
        """The stop in progress."""
        self.check: NodeCheck | None = None
        """The user's check of this node, while it runs."""

    def fds(self) -> list[int]:
        """Descriptors that become readable when there is something to do."""
        return [fd for each in self._begun() for fd in each.fds()]

    def wake_at(self) -> float:
        """The time of the next thing to do, on the clock; infinite for never."""
        return min((each.wake_at() for each in self._begun()), default=math.inf)

    def events(self) -> Iterator[Event]:
        """Continue the stop in progress, and the running check."""
        if self.stop is not None and self.stop.step():
            self.stop = None
            yield self._stopped()
        if self.check is not None and self.check.step():
            check, self.check = self.check, None
            yield check.outcome()

    def begin_check(self) -> None:
        """Begin the user's check of this node."""
        assert self._workers.begin_check is not None, "only where the user has a check"
        self.check = self._workers.begin_check()

    def begin_stop(self, step: StopWorkers) -> WorkersStopped | None:
        """Begin to stop the workers; returns the event if they are gone already."""
        self.stop = self._workers.stop(step)
        if self.stop is not None and not self.stop.step():
            return None
        self.stop = None
        return self._stopped()

    def kill(self) -> None:
        """Give no more time: SIGKILL to all that is left."""
        for each in self._begun():
            each.kill_now()

    def _begun(self) -> list[StopInProgress | NodeCheck]:
        return [each for each in (self.stop, self.check) if each is not None]
