"""The agent's loop, with a worker that ends at a chosen moment."""

from __future__ import annotations

import errno
import os
import select
import sys
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
from rallypoint.features.preemption.rules import PreemptionRequested
from rallypoint.workers.logs.specs import DefaultLogsSpecs
from tests.unit.agent.test_stopping import TIMEOUT
from tests.unit.agent.thread_workers import ThreadWorkers
from tests.unit.compat.test_subclass import ours

pytestmark = pytest.mark.process


class EndsTheWorker(Source):
    """Preempts the job once its worker runs; lets the worker end once it is asked to save, and waits until it has."""

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


def test_a_worker_that_ends_after_the_look_at_exits_has_finished_and_not_saved(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    code = "import sys; open(sys.argv[1]).read()"
    spec = WorkerSpec("default", 1, ours(), entrypoint=sys.executable, args=("-c", code, str(gate)))
    workers = WorkerController(spec, rendezvous_of(spec), GracePeriods(), DefaultLogsSpecs(str(tmp_path)))
    loop = AgentLoop(workers)
    between = EndsTheWorker(workers, gate)
    workers.sources.insert(workers.sources.index(workers.folder), between)
    try:
        result = loop.run(())
    finally:
        workers.rendezvous.shutdown()
        workers.close()
    assert between.ended
    assert result.state is WorkerState.SUCCEEDED


def test_a_node_requests_its_place_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure it keeps it, with the worker store that it has told while its workers ran."""
    said: list[type] = []
    send = LocalLink.send

    def recorded(link: LocalLink, request: Request) -> None:
        said.append(type(request))
        send(link, request)

    monkeypatch.setattr(LocalLink, "send", recorded)
    code = "import os, sys; sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"
    spec = WorkerSpec("default", 1, ours(), entrypoint=sys.executable, args=("-c", code), max_restarts=1)
    workers = WorkerController(spec, rendezvous_of(spec), GracePeriods(), DefaultLogsSpecs(str(tmp_path)))
    try:
        result = AgentLoop(workers).run(())
    finally:
        workers.rendezvous.shutdown()
        workers.close()
    assert result.state is WorkerState.SUCCEEDED
    assert said == [JoinRequest, NextStore, Fail, Succeed]


class Starts(WorkerController):
    """Its program fails in the first round; then its starts raise these errors, one after the other."""

    def __init__(self, folder: Path, errors: list[Exception], max_restarts: int = 1) -> None:
        code = "import os, sys; sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')"
        of = WorkerSpec("default", 1, ours(), entrypoint=sys.executable, args=("-c", code), max_restarts=max_restarts)
        super().__init__(of, rendezvous_of(of), GracePeriods(), DefaultLogsSpecs(str(folder)))
        self.errors = errors

    def start(self) -> None:
        if self.started_at and self.errors:
            raise self.errors.pop(0)
        super().start()

    def run(self) -> RunResult:
        try:
            return AgentLoop(self).run(())
        finally:
            self.rendezvous.shutdown()
            self.close()


def test_a_shortage_at_a_restart_is_waited_out(tmp_path: Path) -> None:
    shortage = [OSError(errno.EAGAIN, "no process"), RuntimeError("can't start new thread"), MemoryError()]
    workers = Starts(tmp_path, list(shortage))
    assert workers.run().state is WorkerState.SUCCEEDED
    assert not workers.errors


def test_a_node_that_cannot_start_its_workers_again_fails_with_the_cause(tmp_path: Path) -> None:
    result = Starts(tmp_path, [UserError("the program is gone")]).run()
    assert result.state is WorkerState.FAILED
    assert result.cause is not None
    assert result.cause.message == "its workers cannot be started: the program is gone"
    assert result.cause.ending is Ending.INFRASTRUCTURE


def test_the_failure_to_start_them_again_uses_a_restart(tmp_path: Path) -> None:
    assert Starts(tmp_path, [UserError("gone for a moment")], max_restarts=2).run().state is WorkerState.SUCCEEDED


def test_in_the_first_round_the_error_ends_the_agent(tmp_path: Path) -> None:
    workers = Starts(tmp_path, [])
    workers.group.spec.entrypoint = str(tmp_path / "missing")
    with pytest.raises(UserError, match="was not found"):
        workers.run()


def test_the_progress_of_a_round_is_reported_before_the_next_one_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request may complete that round, whose workers are measured by what was known then."""
    workers = ThreadWorkers(lambda rank, start, stopping: rank)
    calls: list[str] = []
    monkeypatch.setattr(workers.folder, "end_round", lambda: calls.append("progress"))
    monkeypatch.setattr(workers.rendezvous, "join", lambda *_args, **_options: calls.append("request"))
    loop = AgentLoop(workers)
    loop._actions.steps[RequestJoin](RequestJoin())
    loop._mailbox.close()
    assert calls == ["progress", "request"]
