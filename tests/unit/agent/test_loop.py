"""The agent's loop, with workers that end at chosen moments."""

from __future__ import annotations

import errno
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rallypoint.agent.launch import rendezvous_of
from rallypoint.agent.loop import AgentLoop
from rallypoint.agent.signals import GracePeriods
from rallypoint.agent.sources import Source
from rallypoint.agent.spec import RunResult, WorkerSpec, WorkerState
from rallypoint.agent.steps import Event, RequestJoin
from rallypoint.agent.workers import WorkerController
from rallypoint.base.errors import UserError
from rallypoint.control.coordinator.dispatcher import LocalLink
from rallypoint.control.membership.state import Fail, Succeed
from rallypoint.control.protocol.messages import JoinRequest, NextStore, Request
from rallypoint.failures.cause import Ending
from rallypoint.failures.failure import ProcessFailure
from rallypoint.features.preemption.rules import PreemptionRequested
from rallypoint.observe.telemetry import metrics
from rallypoint.workers.logs.specs import DefaultLogsSpecs
from tests.unit.agent.test_stopping import TIMEOUT
from tests.unit.agent.third_party import outcome
from tests.unit.agent.thread_workers import ThreadWorkers
from tests.unit.compat.test_subclass import ours
from tests.unit.telemetry.test_agent import MemoryMetrics

pytestmark = pytest.mark.process


FAILS_ONCE = "import os, sys; sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"


class Workers(WorkerController):
    """One worker; starts after the first round raise these errors, one after the other."""

    def __init__(self, folder: Path, *args: str, max_restarts: int = 1, errors: Sequence[Exception] = ()) -> None:
        args = args or ("-c", FAILS_ONCE)
        of = WorkerSpec("default", 1, ours(), entrypoint=sys.executable, args=args, max_restarts=max_restarts)
        super().__init__(of, rendezvous_of(of), GracePeriods(), DefaultLogsSpecs(str(folder)))
        self.errors = [*errors]
        self.loop = AgentLoop(self)

    def start(self) -> None:
        if self.started_at and self.errors:
            raise self.errors.pop(0)
        super().start()

    def run(self) -> RunResult:
        try:
            return self.loop.run(())
        finally:
            self.rendezvous.shutdown()
            self.close()


class EndsTheWorker(Source):
    """Preempts the job when its worker runs, then lets the worker end, and waits for that."""

    def __init__(self, workers: WorkerController, gate: Path) -> None:
        self._workers = workers
        self._gate = gate
        self._preempted = self.ended = False

    def step(self) -> list[Event]:
        if not self._workers.started_at:
            return []
        if not self._preempted:
            self._preempted = True
            return [PreemptionRequested(60.0, "received SIGUSR2")]
        if not self.ended:
            self.ended = True
            (worker, _reaper) = self._workers.exit_fds() or []
            self._gate.write_text("go")
            assert select.select([worker], [], [], TIMEOUT)[0]
        return []


def test_a_worker_that_ends_after_the_last_look_has_finished(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    workers = Workers(tmp_path, "-c", "import sys; open(sys.argv[1]).read()", str(gate), max_restarts=3)
    between = EndsTheWorker(workers, gate)
    workers.sources.insert(workers.sources.index(workers.folder), between)
    assert workers.run().state is WorkerState.SUCCEEDED
    assert between.ended


def test_a_node_requests_its_place_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure it keeps its place, with the worker store that it announced while its workers ran."""
    sent: list[type] = []
    send = LocalLink.send

    def recorded(link: LocalLink, request: Request) -> None:
        sent.append(type(request))
        send(link, request)

    monkeypatch.setattr(LocalLink, "send", recorded)
    assert Workers(tmp_path).run().state is WorkerState.SUCCEEDED
    assert sent == [JoinRequest, NextStore, Fail, Succeed]


@pytest.mark.parametrize(
    ("errors", "max_restarts"),
    [
        ([OSError(errno.EAGAIN, "no process"), RuntimeError("can't start new thread"), MemoryError()], 1),
        ([UserError("gone for a moment")], 2),
    ],
    ids=["shortages are waited out", "other errors use a restart"],
)
def test_errors_at_a_restart(tmp_path: Path, errors: list[Exception], max_restarts: int) -> None:
    workers = Workers(tmp_path, max_restarts=max_restarts, errors=errors)
    assert workers.run().state is WorkerState.SUCCEEDED
    assert not workers.errors


def test_an_error_at_the_start_of_workers_fails_the_node(tmp_path: Path) -> None:
    result = Workers(tmp_path, errors=[UserError("the program is gone")]).run()
    assert result.state is WorkerState.FAILED
    assert result.cause is not None
    assert result.cause.message == "its workers cannot be started: the program is gone"
    assert result.cause.ending is Ending.INFRASTRUCTURE
    workers = Workers(tmp_path)
    workers.group.spec.entrypoint = str(tmp_path / "missing")
    with pytest.raises(UserError, match="was not found"):  # in the first round, it ends the agent
        workers.run()


def test_progress_is_reported_before_the_next_place_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request may complete the next round, which measures workers by what it knows then."""
    workers = ThreadWorkers(lambda rank, start, stopping: rank)
    calls: list[str] = []
    monkeypatch.setattr(workers.folder, "end_round", lambda: calls.append("progress"))
    monkeypatch.setattr(workers.rendezvous, "join", lambda *_args, **_options: calls.append("request"))
    loop = AgentLoop(workers)
    loop._actions.steps[RequestJoin](RequestJoin())
    loop._mailbox.close()
    assert calls == ["progress", "request"]


class StuckWorkers(ThreadWorkers):
    """A worker that no signal ends: no restart would help, though one is left."""

    def poll(self) -> RunResult:
        return RunResult(WorkerState.UNHEALTHY, failures={0: ProcessFailure(0, 1, -9, "")})

    def restart_limit(self) -> int:
        return 0


def test_a_stuck_worker_leaves_no_restart_in_metrics_and_health_check(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, kept = StuckWorkers(lambda rank, start, stopping: stopping.wait(30)), MemoryMetrics()
    monkeypatch.setattr(metrics, "_handlers", {})
    metrics.configure(kept)
    try:
        assert outcome(workers).is_failed()
    finally:
        metrics.configure(metrics.NullMetricHandler())
    assert workers.look().status()["remaining_restarts"] == 0
    assert [value for _, name, value in kept.seen if name == "workers.default.remaining_restarts"] == [0]
