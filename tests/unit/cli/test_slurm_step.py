"""`rallyctl --slurm=JOBID`: the command of the step, and refusals; `tests/slurm` runs it in Slurm."""

from __future__ import annotations

import os
import sys

import pytest

from rallypoint.cli.rallyctl import main
from tests.jobs.launching import RALLYCTL


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that this process would execute."""
    commands: list[list[str]] = []

    def replace(program: str, command: list[str], _environ: object) -> None:
        commands.append(command)
        raise FileNotFoundError(2, "No such file or directory", program)

    monkeypatch.setattr(os, "execvpe", replace)
    return commands


@pytest.mark.parametrize("option", [["--slurm=12_3"], ["--slurm", "12_3"], ["--slu=12_3"]])
def test_the_command_of_the_step(option: list[str], started: list[list[str]]) -> None:
    assert main([*option, "drain", "n2", "--rdzv-id=j"]) == 1
    (command,) = started
    assert command[:2] == ["srun", "--jobid=12_3"]
    assert "--overlap" in command
    at = command.index(sys.executable)
    assert command[at:] == [*RALLYCTL, "drain", "n2", "--rdzv-id=j"]


def test_without_srun(started: list[list[str]], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--slurm=12", "status"]) == 1
    assert "--slurm=12: srun cannot be started (No such file or directory)" in capfd.readouterr().err


@pytest.mark.parametrize("job", ["my-job", "12;x", "-5", "1_2_3"])
def test_invalid_job_ids(job: str, started: list[list[str]], capfd: pytest.CaptureFixture[str]) -> None:
    assert main([f"--slurm={job}", "status"]) == 2
    assert f"--slurm={job}" in capfd.readouterr().err
    assert not started
