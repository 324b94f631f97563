"""A stop that is under way while the agent hears everything else: workers of a user's own and ours."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rallypoint.agent.launch.api import elastic_launch
from rallypoint.agent.launch.config import LaunchConfig
from rallypoint.agent.loop import run_agent
from rallypoint.agent.signals import handled_signals
from rallypoint.agent.spec import WorkerGroup, WorkerSpec
from rallypoint.base.errors import SignalException
from rallypoint.compat.agent import LocalElasticAgent
from rallypoint.workers.logs.specs import DefaultLogsSpecs
from tests.unit.agent.third_party import outcome
from tests.unit.agent.thread_workers import ThreadWorkers
from tests.unit.compat.test_subclass import Task, ours

pytestmark = pytest.mark.process

TIMEOUT = 120.0


class HandStop:
    """A stop that is done when it is told so."""

    def __init__(self, workers: SlowWorkers) -> None:
        self._workers = workers
        self._fd = os.eventfd(0)
        self._told = threading.Event()

    def fds(self) -> list[int]:
        return [self._fd]

    def wake_at(self) -> float:
        return float("inf")

    def step(self) -> bool:
        if not self._told.is_set():
            return False
        os.close(self._fd)
        self._workers.join()
        self._workers.calls.append("gone")
        return True

    def kill_now(self) -> None:
        self._workers.calls.append("hurry")
        self.tell()

    def tell(self) -> None:
        self._told.set()
        os.eventfd_write(self._fd, 1)


class SlowWorkers(ThreadWorkers):
    """Stops take until they are told to be done."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.stops: list[HandStop] = []
        self.begun = threading.Semaphore(0)

    def begin_stop(self, death_sig: signal.Signals, timeout: float, *, keeps: bool) -> HandStop:
        self.calls.append(f"begin {death_sig.name}")
        self.stops.append(HandStop(self))
        self.begun.release()
        return self.stops[-1]


@contextmanager
def beside(work: threading.Thread) -> Iterator[None]:
    work.start()
    try:
        yield
    finally:
        work.join(TIMEOUT)
        assert not work.is_alive()


def test_workers_are_started_again_when_the_others_are_gone() -> None:
    def fail_once(rank: int, start: int, stopping: threading.Event) -> int:
        if start == 0:
            raise ValueError("once")
        return start

    workers = SlowWorkers(fail_once)

    def end_both_stops() -> None:
        for number in range(2):
            assert workers.begun.acquire(timeout=TIMEOUT)
            workers.stops[number].tell()

    with beside(threading.Thread(target=end_both_stops)):
        assert outcome(workers).return_values == {0: 1}
    assert workers.calls == ["start", "begin SIGTERM", "gone", "start", "begin SIGTERM", "gone", "shutdown SIGTERM"]


def test_a_second_interrupt_hurries_the_stop() -> None:
    workers = SlowWorkers(lambda rank, start, stopping: stopping.wait(TIMEOUT))

    def interrupt_twice() -> None:
        assert workers.runs.wait(TIMEOUT)
        os.kill(os.getpid(), signal.SIGINT)
        assert workers.begun.acquire(timeout=TIMEOUT)
        os.kill(os.getpid(), signal.SIGINT)

    with beside(threading.Thread(target=interrupt_twice)), pytest.raises(SignalException) as raised:
        run_agent(workers)
    assert raised.value.sigval == signal.SIGINT
    assert workers.calls == ["start", "begin SIGINT", "hurry", "gone", "shutdown SIGTERM"]


def local(kind: type[LocalElasticAgent], folder: Path, code: str) -> LocalElasticAgent:
    worker = WorkerSpec("default", 1, ours(), entrypoint=sys.executable, args=("-c", code))
    return kind(worker, DefaultLogsSpecs(str(folder)), shutdown_timeout=5)


@pytest.mark.parametrize("name", ["_stop_workers", "_shutdown"])
def test_a_way_of_its_own_to_stop_workers_is_taken(tmp_path: Path, name: str) -> None:
    calls: list[str] = []

    class Noting(LocalElasticAgent):
        pass

    def noted(self: LocalElasticAgent, *arguments: object) -> None:
        calls.append(f"{name} of {type(self).__name__}")
        getattr(LocalElasticAgent, name)(self, *arguments)

    setattr(Noting, name, noted)
    assert outcome(local(Noting, tmp_path, "raise SystemExit(3)")).is_failed()
    assert calls[0] == f"{name} of Noting"


def test_an_interrupt_that_nobody_handles_leaves_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM")
    started, pids = threading.Event(), list[int]()

    class Telling(LocalElasticAgent):
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
            ids = super()._start_workers(worker_group)
            pids.extend(ids.values())
            started.set()
            return ids

    def interrupt() -> None:
        assert started.wait(TIMEOUT)
        os.kill(os.getpid(), signal.SIGINT)

    agent = local(Telling, tmp_path, "import time; time.sleep(600)")
    with beside(threading.Thread(target=interrupt)), pytest.raises(KeyboardInterrupt):
        agent.run()
    assert len(pids) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_end_turns_no_success_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    specs = DefaultLogsSpecs()
    tidied: list[bool] = []

    def tidy() -> None:
        os.kill(os.getpid(), number)
        DefaultLogsSpecs.clean_up(specs)
        tidied.append(True)

    monkeypatch.setattr(specs, "clean_up", tidy)
    config = LaunchConfig(1, 1, 1, logs_specs=specs, rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="late")
    monkeypatch.delenv("TORCHELASTIC_SIGNALS_TO_HANDLE", raising=False)
    before = signal.getsignal(number)
    assert elastic_launch(config, sys.executable)("-c", "") == {0: None}
    assert tidied
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) == before


def test_signals_that_arrive_ignored_stay_so_unless_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_SIGNALS_TO_HANDLE", raising=False)
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert handled_signals() == [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT]
        monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM, SIGHUP,SIGNOPE")
        assert handled_signals() == [signal.SIGTERM, signal.SIGHUP]
    finally:
        signal.signal(signal.SIGHUP, former)
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
    assert signal.SIGHUP in handled_signals()
