"""Requeuing a Slurm job, with stand-ins for Slurm's programs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rallypoint.base.process_table import read_stat
from rallypoint.features.preemption.commands import SchedulerCommand
from rallypoint.features.preemption.limits import job_name
from rallypoint.features.preemption.slurm import SlurmRequeue, times_requeued
from tests.waiting import until

pytestmark = pytest.mark.process


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on PATH for the programs of Slurm."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    program(tmp_path, "squeue", "echo RUNNING")
    return tmp_path


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


JOB = {"SLURM_JOB_ID": "17"}


def test_job_names_and_restart_counts() -> None:
    assert job_name(JOB) == "17"
    assert job_name(JOB | {"SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "2"}) == "15_2"
    assert job_name({}) == ""
    assert [times_requeued({"SLURM_RESTART_COUNT": text}) for text in ("3", "", "x", "-1")] == [3, 0, 0, 0]


def test_jobs_are_requeued_as_often_as_allowed(slurm: Path) -> None:
    program(slurm, "scontrol", f'echo "$@" >{slurm}/asked')
    assert SlurmRequeue(3, JOB).finish() == "Slurm job 17 is requeued (1 of 3)"
    assert (slurm / "asked").read_text() == "requeue 17\n"
    program(slurm, "squeue", "exit 127")  # which is not needed
    assert SlurmRequeue(3, JOB | {"SLURM_RESTART_COUNT": "2"}).finish() == "Slurm job 17 is requeued (3 of 3)"
    (slurm / "asked").unlink()
    refused = SlurmRequeue(3, JOB | {"SLURM_RESTART_COUNT": "3"}).finish()
    assert refused.startswith("Slurm job 17 is not requeued")
    assert refused.endswith("it has reached --requeue=3")
    program(slurm, "squeue", "echo COMPLETING")
    assert "it is ending already" in SlurmRequeue(3, JOB).finish()
    assert not (slurm / "asked").exists()


def test_the_message_of_scontrol_is_kept(slurm: Path) -> None:
    program(slurm, "scontrol", 'echo "Requested operation is presently disabled for job 17" >&2; exit 1')
    message = SlurmRequeue(3, JOB).finish()
    assert "not requeued: Requested operation is presently disabled for job 17; run 'scontrol requeue 17'" in message
    program(slurm, "scontrol", "exit 4")
    assert "it ended with exit code 4" in SlurmRequeue(3, JOB).finish()
    program(slurm, "scontrol", "kill -KILL $$")
    assert "it was killed by SIGKILL" in SlurmRequeue(3, JOB).finish()


def test_signals_to_the_step_do_not_end_the_request(slurm: Path) -> None:
    """Slurm sends SIGTERM to all processes of the step, including this one, as soon as it has accepted."""
    program(slurm, "scontrol", "kill -TERM $$; kill -INT $$; kill -HUP $$; exit 0")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert "is requeued" in SlurmRequeue(3, JOB).finish()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    command = SchedulerCommand(
        ["sh", "-c", f"sleep 1000 & echo $! >{tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; wait"],
        os.environ,
    )
    until((tmp_path / "pid").exists)
    assert command.answer() == (None, [])
    started = int((tmp_path / "pid").read_text())
    until(lambda: (stat := read_stat(started)) is None or stat.ended)
