"""Launches that are disturbed end, also where the job was done before the disturbance had an effect."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.frameworks import runs
from tests.frameworks.programs import Program
from tests.frameworks.runs import KILLED_AT, STEPS, Runs

DEADLINE = 30.0

SCRIPT = f"""
import os, signal
first = 0 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else {STEPS}
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
if os.environ["RANK"] == "0":
    print(f"2 workers, from step {{first}}\\n", end="", flush=True)
    for step in range(first + 1, {STEPS} + 1):
        print(f"step {{step}} of {STEPS}\\n", end="", flush=True)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
if first == 0:
    signal.pause()
elif os.environ["RANK"] == "0":
    print("final loss 0.5\\n", end="", flush=True)
"""
"""Rank 0 does all steps before it can be stopped, so that the workers that begin again have none left."""


class Written(Program):
    """A program that a test has written."""

    @property
    def script(self) -> Path:
        """Its name is its path."""
        return Path(self.name)


def test_a_launch_whose_steps_were_all_done_before_the_kill_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "DEADLINE", DEADLINE)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    began = time.monotonic()
    with Runs(Written(str(script), "json"), tmp_path).launched() as launch:
        launch.start("--standalone", "--nproc-per-node=2")
        launch.at_step(KILLED_AT)
        launch.kill(launch.last_worker())
        outcome = launch.outcome()
    assert (outcome.loss, outcome.codes, outcome.left) == (0.5, [0], []), outcome.said
    assert outcome.begun == [(2, 0), (2, STEPS)]
    assert outcome.recovery is None, "no step came after the kill"
    assert time.monotonic() - began < DEADLINE


def test_a_launch_that_ends_before_a_step_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "DEADLINE", DEADLINE)
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(0)")
    with Runs(Written(str(script), "json"), tmp_path).launched() as launch:
        launch.start("--standalone", "--nproc-per-node=2")
        with pytest.raises(AssertionError, match="the launch ended before step 1:"):
            launch.at_step(1)
