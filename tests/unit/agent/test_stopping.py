"""Agents stop their workers: in a user's way, at an unhandled interrupt, and at a late signal."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rallypoint.agent.launch import LaunchConfig, elastic_launch, rendezvous_of
from rallypoint.agent.signals import GracePeriods
from rallypoint.agent.spec import WorkerGroup, WorkerSpec
from rallypoint.agent.workers import WorkerController
from rallypoint.compat.agent import LocalElasticAgent
from rallypoint.workers.logs.specs import DefaultLogsSpecs
from tests.unit.agent.third_party import outcome
from tests.unit.compat.test_subclass import ours

pytestmark = pytest.mark.process

TIMEOUT = 120.0


@contextmanager
def beside(work: threading.Thread) -> Iterator[None]:
    work.start()
    try:
        yield
    finally:
        work.join(TIMEOUT)
        assert not work.is_alive()


def local(kind: type[LocalElasticAgent], folder: Path, code: str) -> LocalElasticAgent:
    worker = WorkerSpec("default", 1, ours(), entrypoint=sys.executable, args=("-c", code))
    return kind(worker, DefaultLogsSpecs(str(folder)), shutdown_timeout=5)


@pytest.mark.parametrize("name", ["_stop_workers", "_shutdown"])
def test_overridden_stops_are_called(tmp_path: Path, name: str) -> None:
    calls: list[str] = []

    class Overriding(LocalElasticAgent):
        pass

    def override(self: LocalElasticAgent, *arguments: object) -> None:
        calls.append(type(self).__name__)
        getattr(LocalElasticAgent, name)(self, *arguments)

    setattr(Overriding, name, override)
    assert outcome(local(Overriding, tmp_path, "raise SystemExit(3)")).is_failed()
    assert calls[0] == "Overriding"


def test_an_unhandled_interrupt_leaves_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM")
    started, pids = threading.Event(), list[int]()

    class Noting(LocalElasticAgent):
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
            ids = super()._start_workers(worker_group)
            pids.extend(ids.values())
            started.set()
            return ids

    def interrupt() -> None:
        assert started.wait(TIMEOUT)
        os.kill(os.getpid(), signal.SIGINT)

    agent = local(Noting, tmp_path, "import time; time.sleep(600)")
    with beside(threading.Thread(target=interrupt)), pytest.raises(KeyboardInterrupt):
        agent.run()
    assert len(pids) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
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


def test_a_node_without_workers_has_stopped_none(tmp_path: Path) -> None:
    spec = WorkerSpec("default", 2, ours(), entrypoint="true")
    workers = WorkerController(spec, rendezvous_of(spec), GracePeriods(), DefaultLogsSpecs(str(tmp_path)))
    assert workers.stopped() == ()
