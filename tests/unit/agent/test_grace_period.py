"""The workers' time when a scheduler ends their node: from a given, known or assumed grace period."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rallypoint.agent.signals import VARIABLE, GracePeriods, stated_grace_period, termination_grace
from rallypoint.base.errors import UserError
from rallypoint.clusters.grace import kill_wait, scheduler_grace_period

SLURM, KUBERNETES = {"SLURM_JOB_ID": "7"}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.mark.parametrize(
    ("environ", "chosen", "total", "stop"),
    [
        ({}, False, math.inf, 30),
        (SLURM, False, math.inf, 25),
        (KUBERNETES, False, math.inf, 25),
        (SLURM, True, math.inf, 30),
        ({VARIABLE: "60"}, False, 55, 30),
        ({VARIABLE: "30"}, True, 25, 25),
        ({VARIABLE: "6"} | SLURM, False, 3, 3),
        ({VARIABLE: ""} | KUBERNETES, False, math.inf, 25),
        ({"PBS_JOBID": "1.s"}, False, math.inf, 5),
        ({"LSB_JOBID": "1"}, False, math.inf, 5),
        ({"LSB_JOBID": "1"}, True, math.inf, 30),
        ({"TRAINING_JOB_NAME": "j"}, False, math.inf, 30),
    ],
)
def test_termination_grace(environ: dict[str, str], chosen: bool, total: float, stop: float, tmp_path: Path) -> None:
    if environ is SLURM:  # this machine may have another
        (tmp_path / "slurm.conf").touch()
        environ = {**SLURM, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    assert termination_grace(30, chosen=chosen, environ=environ) == (total, stop)


@pytest.mark.parametrize(
    ("stated", "stop", "notice", "elapsed", "left"),
    [
        ("120", 30, 85, 0, 30),
        ("30", 30, 12.5, 0, 25),
        ("30", 10, 15, 20, 5),
        ("30", 10, 15, 26, 0),
        ("", 25, math.inf, 1000, 25),
    ],
)
def test_notice_and_stop_share_the_grace_period(
    stated: str, stop: float, notice: float, elapsed: float, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, stated)
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    grace = GracePeriods(stop)
    assert (grace.notice, grace.within(1e6)) == (math.inf, 1e6)
    grace.terminated()
    now += elapsed
    assert (grace.notice, grace.within(1e6)) == (notice, left)


def test_after_a_failure_workers_have_less_time() -> None:
    assert [GracePeriods(stop).seconds(failed=True) for stop in (30, 3)] == [5, 3]
    assert GracePeriods(3, failure=20).seconds(failed=True) == 20


def test_kill_wait_in_slurm_conf(tmp_path: Path) -> None:
    path = tmp_path / "slurm.conf"
    path.write_text("ClusterName=a\n # KillWait=3\n killwait = 120  # two minutes\n")
    environ = {**SLURM, "SLURM_CONF": str(path)}
    assert scheduler_grace_period(environ) == 120
    assert termination_grace(30, chosen=False, environ=environ)[1] == 30, "a longer one changes nothing"


@pytest.mark.parametrize("lines", [[], ["KillWait="], ["KillWait=soon"], ["KillWaits=3"], ["=5"], ["\0"]])
def test_default_kill_wait(lines: list[str]) -> None:
    assert kill_wait(lines) == 30


@pytest.mark.parametrize("text", ["0", "-3", "soon", "nan", "inf"])
def test_invalid_grace_periods(text: str) -> None:
    with pytest.raises(UserError, match=f"{VARIABLE}='{text}' is not a number of seconds above 0"):
        stated_grace_period({VARIABLE: text})
