"""A user's agent, whose workers are threads, overrides only the methods that torch's users override."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rallypoint.agent.spec import RunResult, WorkerGroup, WorkerSpec, WorkerState
from rallypoint.base.errors import UserError
from rallypoint.compat.agent import SimpleElasticAgent
from rallypoint.control.protocol.errors import RendezvousStateError
from rallypoint.failures.failure import ProcessFailure
from rallypoint.rendezvous.handler import RendezvousHandler, get_rendezvous_handler
from rallypoint.rendezvous.params import RendezvousParameters
from rallypoint.store.plain import HashStore
from tests.unit.agent.third_party import CountingHandler, outcome

Task = Callable[[int, int, threading.Event], object]
"""Called with the rank, the number of the start from 0, and an event that is set to stop it."""


class ThreadAgent(SimpleElasticAgent):
    """Runs `task` in one thread for each worker."""

    def __init__(self, spec: WorkerSpec, task: Task) -> None:
        super().__init__(spec)
        self._task = task
        self._stopping = threading.Event()
        self._threads: dict[int, threading.Thread] = {}
        self._values: dict[int, object] = {}
        self._errors: dict[int, Exception] = {}
        self.calls: list[str] = []
        self.starts = 0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.calls.append("start")
        self._stopping = threading.Event()
        self._values, self._errors = {}, {}
        self._threads = {
            worker.local_rank: threading.Thread(
                target=self._work, args=(worker.global_rank, self.starts, self._stopping)
            )
            for worker in worker_group.workers
        }
        self.starts += 1
        for thread in self._threads.values():
            thread.start()
        return {local_rank: thread.ident for local_rank, thread in self._threads.items()}

    def _work(self, rank: int, start: int, stopping: threading.Event) -> None:
        try:
            self._values[rank] = self._task(rank, start, stopping)
        except Exception as error:
            self._errors[rank] = error

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.calls.append("stop")
        self._end()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._errors:
            failures = {rank: ProcessFailure(0, 1, 1, "") for rank in self._errors}
            return RunResult(WorkerState.FAILED, failures=failures)
        if any(thread.is_alive() for thread in self._threads.values()):
            return RunResult(WorkerState.HEALTHY)
        return RunResult(WorkerState.SUCCEEDED, return_values=dict(self._values))

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self.calls.append(f"shutdown {death_sig.name}")
        self._end()

    def _end(self) -> None:
        self._stopping.set()
        for thread in self._threads.values():
            thread.join(30)


def ours() -> RendezvousHandler:
    return get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "job", 1, 1))


def theirs() -> RendezvousHandler:
    return CountingHandler(HashStore(), "job", 1, address="127.0.0.1")


HANDLERS = pytest.mark.parametrize("handler", [ours, theirs])


def spec(handler: RendezvousHandler, workers: int = 2, max_restarts: int = 0) -> WorkerSpec:
    return WorkerSpec("default", workers, handler, entrypoint=print, max_restarts=max_restarts, monitor_interval=0.01)


@HANDLERS
def test_restarts_run_out(handler: Callable[[], RendezvousHandler]) -> None:
    def task(rank: int, start: int, stopping: threading.Event) -> None:
        if rank == 1:
            raise ValueError("always")
        stopping.wait(30)

    agent = ThreadAgent(spec(handler(), max_restarts=2), task)
    result = outcome(agent)
    assert result.is_failed()
    assert set(result.failures) == {1}
    assert result.cause is not None
    assert result.cause.rank == 1
    assert result.stopped == (), "the agent does not know which workers it ended"
    assert agent.starts == 3
    assert agent.get_worker_group().state is WorkerState.FAILED


@HANDLERS
def test_an_error_of_a_handler_s_shutdown_does_not_hide_the_result(
    handler: Callable[[], RendezvousHandler], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = handler()
    ended = made.shutdown

    def shutdown() -> bool:
        ended()
        raise OSError("the disk is full")

    monkeypatch.setattr(made, "shutdown", shutdown)
    agent = ThreadAgent(spec(made), lambda rank, start, stopping: rank)
    assert outcome(agent).return_values == {0: 0, 1: 1}
    assert "could not be shut down" in caplog.text
    assert "the disk is full" in caplog.text


class ByItself(ThreadAgent):
    """Runs the rendezvous by itself, as agents written for torch may."""

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        info = worker_group.spec.rdzv_handler.next_rendezvous()
        where = info.bootstrap_store_info
        worker_group.store, worker_group.group_rank, worker_group.group_world_size = (
            info.store,
            info.rank,
            info.world_size,
        )
        if where is not None:
            worker_group.master_addr, worker_group.master_port = where.master_addr, where.master_port
        worker_group.workers = self._assign_worker_ranks(info.store, info.rank, info.world_size, worker_group.spec)


def test_an_agent_may_run_the_rendezvous_by_itself() -> None:
    stores: list[tuple[int, int]] = []

    def task(rank: int, start: int, stopping: threading.Event) -> object:
        group = agent.get_worker_group()
        assert group.store is not None
        stores.append((start, group.store.add("here", 1)))
        if start == 0 and rank == 1:
            raise ValueError("once")
        return group.group_rank, group.group_world_size

    agent = ByItself(spec(ours(), max_restarts=1), task)
    assert outcome(agent).return_values == {0: (0, 1), 1: (0, 1)}
    assert sorted(stores) == [(0, 1), (0, 2), (1, 1), (1, 2)], "each round has its own store"


def test_errors_of_a_subclass_end_the_agent() -> None:
    class Lost(ThreadAgent):
        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            return RunResult(WorkerState.UNKNOWN)

    class Broken(ThreadAgent):
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            raise OSError("no more threads")

    class Twice(ThreadAgent):
        def _rendezvous(self, worker_group: WorkerGroup) -> None:
            super()._rendezvous(worker_group)
            worker_group.spec.rdzv_handler.next_rendezvous()

    agent: ThreadAgent = Lost(spec(ours()), lambda rank, start, stopping: stopping.wait(30))
    with pytest.raises(RuntimeError, match="UNKNOWN"):
        agent.run()
    assert agent.calls == ["start", "shutdown SIGTERM"]
    with pytest.raises(OSError, match="no more threads"):
        Broken(spec(ours()), lambda rank, start, stopping: None).run()
    agent = Twice(spec(ours()), lambda rank, start, stopping: None)
    with pytest.raises(RendezvousStateError, match="runs the rendezvous itself"):
        agent.run()
    assert agent.calls == ["shutdown SIGTERM"]


class Unwell(ThreadAgent):
    """Finds its workers unhealthy in the first start. If `hopeless`, it uses up the restarts."""

    hopeless = False

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self.starts == 1:
            if self.hopeless:
                self._remaining_restarts = 0
            return RunResult(WorkerState.UNHEALTHY)
        return super()._monitor_workers(worker_group)


@HANDLERS
def test_an_unhealthy_group_is_restarted_while_restarts_remain(handler: Callable[[], RendezvousHandler]) -> None:
    agent = Unwell(spec(handler(), max_restarts=2), lambda rank, start, stopping: start or stopping.wait(30))
    assert outcome(agent).return_values == {0: 1, 1: 1}
    assert agent._remaining_restarts == 1
    agent = Unwell(spec(handler(), max_restarts=2), lambda rank, start, stopping: stopping.wait(30))
    agent.hopeless = True
    assert outcome(agent).is_failed()
    assert (agent.starts, agent._remaining_restarts) == (1, 0)


@HANDLERS
def test_overrides_may_call_the_loop_but_not_replace_it(handler: Callable[[], RendezvousHandler]) -> None:
    seen: list[tuple[int | None, int | None]] = []

    class Around(ThreadAgent):
        def _invoke_run(self, role: str = "default") -> RunResult:
            self.calls.append("begins")
            return super()._invoke_run(role)

        def _initialize_workers(self, worker_group: WorkerGroup) -> None:
            super()._initialize_workers(worker_group)
            seen.append((worker_group.group_rank, worker_group.group_world_size))
            assert all(worker.id is not None for worker in worker_group.workers)

    class Instead(ThreadAgent):
        def _invoke_run(self, role: str = "default") -> RunResult:
            self._initialize_workers(self._worker_group)
            return self._monitor_workers(self._worker_group)

    around = Around(spec(handler()), lambda rank, start, stopping: rank)
    assert outcome(around).return_values == {0: 0, 1: 1}
    assert around.calls[:2] == ["begins", "start"]
    assert seen == [(0, 1)]
    instead = Instead(spec(handler()), lambda rank, start, stopping: rank)
    with pytest.raises(UserError, match="_invoke_run"):
        instead.run()
    assert instead.calls == []
