"""A worker that is a thread, for the loop of our own agent."""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection

from rallypoint.agent.launch import rendezvous_of
from rallypoint.agent.signals import GracePeriods
from rallypoint.agent.spec import RunResult, WorkerState
from rallypoint.agent.steps import StopWorkers
from rallypoint.agent.workers import WorkerController
from rallypoint.failures.failure import ProcessFailure
from rallypoint.rendezvous.handler import RendezvousHandler
from rallypoint.workers.logs.specs import DefaultLogsSpecs
from rallypoint.workers.stop import Stop
from tests.unit.compat.test_subclass import Task, ours, spec


class ThreadWorkers(WorkerController):
    """Runs `task`; a ValueError is a failure."""

    def __init__(self, task: Task, handler: RendezvousHandler | None = None) -> None:
        of = spec(handler or ours(), workers=1, max_restarts=1)
        super().__init__(of, rendezvous_of(of), GracePeriods(), DefaultLogsSpecs())
        self._task = task
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._result = RunResult(WorkerState.HEALTHY)
        self.calls: list[str] = []
        self.runs = threading.Event()

    def prepare(self) -> None:
        """There are no processes."""

    def exit_fds(self) -> list[int] | None:
        return None

    def running(self) -> Collection[int]:
        return (0,)

    def ended_in_order(self) -> bool:
        return False

    def start(self) -> None:
        self.calls.append("start")
        self._stopping = threading.Event()
        self._result = RunResult(WorkerState.HEALTHY)
        self._thread = threading.Thread(target=self._work, args=(self.group.restarts, self._stopping))
        self._thread.start()
        self.started({0: self._thread.ident})
        self.runs.set()

    def _work(self, start: int, stopping: threading.Event) -> None:
        try:
            self._result = RunResult(WorkerState.SUCCEEDED, {0: self._task(0, start, stopping)})
        except ValueError:
            failure = ProcessFailure(0, 1, 1, "")
            self._result = RunResult(WorkerState.FAILED, failures={0: failure})

    def poll(self) -> RunResult:
        return self._result

    def stop(self, step: StopWorkers) -> Stop | None:
        self.calls.append(f"begin {signal.Signals(step.signal).name}")
        self.join()
        return None

    def shutdown(self, number: int, timeout: float | None = None) -> None:
        self.calls.append(f"shutdown {signal.Signals(number).name}")
        self.join()

    def join(self) -> None:
        """Stop the thread, and wait for its end."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(30)
