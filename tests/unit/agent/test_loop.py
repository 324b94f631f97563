"""The agent's loop, with a worker that ends at a chosen moment."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

import pytest

from rallypoint.agent.launch import rendezvous_of
from rallypoint.agent.loop import AgentLoop
from rallypoint.agent.signals import GracePeriods
from rallypoint.agent.sources import Source
from rallypoint.agent.spec import WorkerSpec, WorkerState
from rallypoint.agent.steps import Event, PreemptionRequested
from rallypoint.agent.workers import WorkerController
from rallypoint.control.coordinator.dispatcher import LocalLink
from rallypoint.control.membership.state import Fail, Succeed
from rallypoint.control.protocol.messages import JoinRequest, NextStore, Request
from rallypoint.workers.logs.specs import DefaultLogsSpecs
from tests.unit.agent.test_stopping import TIMEOUT
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
