"""The evidence of a failure is that of the workers, and of no process that has the number of one."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from rallypoint.agent.incident import IncidentRecorder
from rallypoint.agent.incident_files import NodeFacts, WorkerFacts
from rallypoint.agent.policy_state import Phase, PolicyState
from rallypoint.base.process_table import read_stat
from rallypoint.membership.state import Reason, RoundEnd
from rallypoint.protocol.messages import RoundEnded

pytestmark = pytest.mark.process


def test_a_process_with_the_number_of_a_worker_that_has_ended_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            worker = read_stat(other.pid)
            assert worker is not None
            worker.started -= 1  # it ended before the other was given its number
            facts = WorkerFacts(0, 0, other.pid, "", "", "", {}, lambda: b"", worker)
            node = NodeFacts("job", "role", 0, "host", 1, 0, 1, 0, 0.0, "program", (facts,), {})
            recorder = IncidentRecorder(str(tmp_path), lambda: node)
            began = time.monotonic()
            recorder.look_at(RoundEnded(RoundEnd(0, Reason.FAILURE, "host")), PolicyState(Phase.RUNNING, 0))
            recorder.close()
            assert time.monotonic() - began < 10, "nothing has waited for its end"
        finally:
            other.kill()
    written = tmp_path / "job" / "round-0" / "host-1"
    assert (written / "incident.json").exists()
    assert not (written / "stacks.txt").exists()
