"""The wall between the coordinator and its optional parts."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import rallypoint.control
from rallypoint.control.coordinator.coordinator import Coordinator
from rallypoint.control.coordinator.extensions import ExtensionRow, load
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import Close, Fail, NodeId, NodeInfo, Settings
from rallypoint.control.protocol.messages import JobEnded, JoinRequest, Placed, RoundEnded
from rallypoint.features.coordinator_table import EXTENSIONS
from tests.unit.coordinator.test_control import CAUSE

CORE = Path(rallypoint.control.__path__[0])
NODES = (NodeId("10.0.0.1", 1, 1, "a"), NodeId("10.0.0.2", 2, 2, "b"))
JOIN = JoinRequest(NodeInfo("default", 1, "", 7000, max_restarts=3, program="train.py"), 600.0)


@pytest.mark.parametrize("row", EXTENSIONS, ids=lambda row: row.name)
def test_the_control_plane_does_not_name_extensions(row: ExtensionRow) -> None:
    module, name = row.place.split(":")
    own = {name, module.rpartition(".")[2]}
    for path in CORE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        assert not names & own, path


@pytest.mark.parametrize("row", EXTENSIONS, ids=lambda row: row.name)
def test_a_job_runs_without_an_extension(row: ExtensionRow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, row.place.partition(":")[0], None)
    with pytest.raises(ImportError):
        load(row.place)
    coordinator = Coordinator(Settings("job", 2, 2), "c")
    for session, node in enumerate(NODES):
        coordinator.open(session, SessionRecord(node, node.addr), 0.0)

    def sent(session: int, request: object) -> list[type]:
        return [type(message) for _, message in coordinator.receive(session, request, 1.0).messages]  # type: ignore[arg-type]

    assert [sent(session, JOIN) for session in range(2)] == [[], [Placed, Placed]]
    assert sent(0, Fail(0, CAUSE, 3)) == [RoundEnded, RoundEnded]
    assert [sent(session, JOIN) for session in range(2)] == [[], [Placed, Placed]]
    coordinator.tick(coordinator.wake_at())
    assert sent(1, Close()) == [JobEnded, JobEnded]
    assert coordinator.extensions.loaded == []
