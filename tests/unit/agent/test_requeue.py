"""Requeuing a Slurm job, with Slurm's programs and their answers."""

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
    """A folder on the PATH in which the programs of Slurm are."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    program(tmp_path, "squeue", "echo RUNNING")
    return tmp_path


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


JOB = {"SLURM_JOB_ID": "17"}


def test_names_of_jobs() -> None:
    assert job_name(JOB) == "17"
    assert job_name(JOB | {"SLURM_ARRAY_JOB_ID": "15", "SLURM_ARRAY_TASK_ID": "2"}) == "15_2"
    assert job_name({}) == ""
    assert [times_requeued({"SLURM_RESTART_COUNT": text}) for text in ("3", "", "x", "-1")] == [3, 0, 0, 0]


def test_it_is_requeued(slurm: Path) -> None:
    program(slurm, "scontrol", f'echo "$@" >{slurm}/said')
    assert SlurmRequeue(3, JOB).finish() == "Slurm job 17 is requeued (1 of 3)"
    assert (slurm / "said").read_text() == "requeue 17\n"
    again = SlurmRequeue(3, JOB | {"SLURM_RESTART_COUNT": "2"}).finish()
    assert again == "Slurm job 17 is requeued (3 of 3)"


def test_no_more_often_than_allowed(slurm: Path) -> None:
    program(slurm, "scontrol", f"touch {slurm}/asked")
    said = SlurmRequeue(3, JOB | {"SLURM_RESTART_COUNT": "3"}).finish()
    assert said.startswith("Slurm job 17 is not requeued")
    assert said.endswith("it has reached --requeue=3")
    assert not (slurm / "asked").exists()


def test_what_scontrol_says_is_told(slurm: Path) -> None:
    program(slurm, "scontrol", 'echo "Requested operation is presently disabled for job 17" >&2; exit 1')
    said = SlurmRequeue(3, JOB).finish()
    assert "not requeued: Requested operation is presently disabled for job 17; run 'scontrol requeue 17'" in said
    program(slurm, "scontrol", "exit 4")
    assert "it ended with exit code 4" in SlurmRequeue(3, JOB).finish()
    program(slurm, "scontrol", "kill -KILL $$")
    assert "it was killed by SIGKILL" in SlurmRequeue(3, JOB).finish()


def test_a_job_that_is_ending_is_not_brought_back(slurm: Path) -> None:
    program(slurm, "squeue", "echo COMPLETING")
    program(slurm, "scontrol", f"touch {slurm}/asked")
    assert "it is ending already" in SlurmRequeue(3, JOB).finish()
    assert not (slurm / "asked").exists()


def test_without_squeue_it_is_requeued_all_the_same(slurm: Path) -> None:
    program(slurm, "squeue", "exit 127")
    program(slurm, "scontrol", "exit 0")
    assert "is requeued" in SlurmRequeue(3, JOB).finish()


def test_what_ends_the_step_does_not_end_the_request(slurm: Path) -> None:
    """Slurm sends SIGTERM to all processes of the step, also to this one, as soon as it has accepted."""
    program(slurm, "scontrol", "kill -TERM $$; kill -INT $$; kill -HUP $$; exit 0")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert "is requeued" in SlurmRequeue(3, JOB).finish()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_a_command_that_does_not_answer_is_ended_with_what_it_has_started(tmp_path: Path) -> None:
    command = SchedulerCommand(
        ["sh", "-c", f"sleep 1000 & echo $! >{tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; wait"],
        os.environ,
    )
    until((tmp_path / "pid").exists)
    assert command.answer() == (None, [])
    started = int((tmp_path / "pid").read_text())
    until(lambda: (stat := read_stat(started)) is None or stat.ended)
