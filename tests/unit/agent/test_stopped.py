"""Whom the report calls stopped by the launcher."""

from __future__ import annotations

from pathlib import Path

from rallypoint.agent.rendezvous_client import rendezvous_of
from rallypoint.agent.signals import GracePeriods
from rallypoint.agent.spec import WorkerSpec
from rallypoint.agent.workers import WorkerController
from rallypoint.workers.logs.specs import DefaultLogsSpecs
from tests.unit.compat.test_subclass import ours


def test_a_node_that_never_had_workers_has_stopped_none(tmp_path: Path) -> None:
    spec = WorkerSpec("default", 2, ours(), entrypoint="true")
    workers = WorkerController(spec, rendezvous_of(spec), GracePeriods(), DefaultLogsSpecs(str(tmp_path)))
    assert workers.stopped() == ()
