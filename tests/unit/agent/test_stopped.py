"""Whom the report calls stopped by the launcher."""

from __future__ import annotations

from pathlib import Path

from rallypoint.agent.local import LocalElasticAgent
from rallypoint.agent.spec import WorkerSpec
from rallypoint.logs.specs import DefaultLogsSpecs
from tests.unit.agent.test_subclass import ours


def test_a_node_that_never_had_workers_has_stopped_none(tmp_path: Path) -> None:
    agent = LocalElasticAgent(WorkerSpec("default", 2, ours(), entrypoint="true"), DefaultLogsSpecs(str(tmp_path)))
    assert agent._stopped_ranks() == ()
