"""The evidence of a failure comes from the workers, not from a process that reuses a worker's pid."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from rallypoint.agent.facts import NodeFacts, WorkerFacts
from rallypoint.agent.policy import Phase, PolicyState
from rallypoint.base.process_table import read_stat
from rallypoint.control.membership.state import Reason, RoundEnd
from rallypoint.control.protocol.messages import RoundEnded
from rallypoint.failures.cause import Cause
from rallypoint.failures.failure import ProcessFailure
from rallypoint.features.incidents import (
    Incident,
    IncidentFacts,
    IncidentRecorder,
    gpu_pieces,
    pieces_of,
    summary_of,
)

pytestmark = pytest.mark.process


def node_of(worker: WorkerFacts) -> NodeFacts:
    return NodeFacts(
        *("job", "role", "HEALTHY", 0, "host", 1, 0, 1, 0, 3, 0.0, "program"),
        workers=(worker,),
        processes=(worker,),
        running=frozenset({0}),
        failures={},
        output_ages=tuple,
    )


def test_a_process_that_reuses_the_pid_of_a_worker_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            worker = read_stat(other.pid)
            assert worker is not None
            worker.started -= 1  # it ended before the other was given its number
            node = node_of(WorkerFacts(0, 0, other.pid, None, "", "", "", {}, lambda: b""))
            recorder = IncidentRecorder(str(tmp_path), lambda: IncidentFacts(node, {0: worker}))
            running = PolicyState(Phase.RUNNING, 0)
            recorder.observe(running, RoundEnded(RoundEnd(0, Reason.FAILURE, "host")), running, ())
            recorder.close()
            assert other.poll() is None
        finally:
            other.kill()
    written = tmp_path / "job" / "round-0" / "host-1"
    assert (written / "incident.json").exists()
    assert not (written / "stacks.txt").exists()


def test_bundles_have_no_secrets(tmp_path: Path) -> None:
    """They may be in an exception, an output and an error file."""
    text = "cannot reach postgres://me:hunter2@db/x with --password hunter2"
    for name in ("out", "err", "error.json"):
        (tmp_path / name).write_text(f'{{"message": "{text}", "api_key": "hunter2"}}\n')
    failure = ProcessFailure(0, 7, 1, str(tmp_path / "error.json"), last_lines=text.encode())
    cause = Cause(0, 0, "host", 7, 1, text, text, 0.0, "")
    out, err, error = (str(tmp_path / name) for name in ("out", "err", "error.json"))
    worker = WorkerFacts(0, 0, 7, 1, out, err, error, {"NCCL_TOKEN": "hunter2", "DB": "hunter2"}, text.encode)
    facts = node_of(worker)._replace(failures={0: failure})
    incident = Incident(0, "failure", text, ends_job=True, cause=cause)
    pieces = {piece.name: piece.data for piece in pieces_of(facts, incident)}
    summary = json.dumps(summary_of(incident, facts))
    assert {"failure.txt", "system.txt", "environment.txt", "workers/rank_0/stdout.txt"} < set(pieces)
    assert [name for name, data in {**pieces, "incident.json": summary.encode()}.items() if b"hunter2" in data] == []
    assert "cannot reach postgres" in summary


def test_the_state_of_gpus_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_pieces() == []
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "GPU UUID: GPU-aaaa1111-0000 $*"\n')
    program.chmod(0o755)
    (piece,) = gpu_pieces()
    assert (piece.name, piece.data) == ("nvidia-smi.txt", b"GPU UUID: GPU-aaaa1111-0000 -q\n")
    monkeypatch.setattr("rallypoint.features.incidents._SMI_TIMEOUT", 0.1)
    program.write_text("#!/bin/sh\nexec /bin/sleep 600\n")
    (piece,) = gpu_pieces()
    assert b"did not answer within 0.1 s" in piece.data
