"""Whole jobs: timers of workers are enforced, and workers stuck in the kernel are found."""

from __future__ import annotations

import os
import re
import signal

import pytest

from tests.jobs.launching import Launcher

ON = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}

USES = """
import os, signal, sys, time
import {module} as timer
path = os.environ["TORCHELASTIC_TIMER_FILE"]
timer.configure(timer.FileTimerClient(path{signal}))
for _ in range(20):
    with timer.expires(after=60):
        pass
if os.environ["RANK"] == "{late}" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    def hangs_here():
        with timer.expires(after=0.3, scope="the step"):
            signal.pause()
    hangs_here()
os.write(1, f"done {{os.environ['RANK']}} {{path}}\\n".encode())  # at once: another worker writes to the same pipe
"""

RAN_OUT = r"its timer 'the step' of 0\.[0-3] s ran out"
"""A request says when a timer ends, and the report what was left of it when the request arrived."""


def test_a_worker_that_is_late_is_shown_killed_and_started_again(rallyrun: Launcher) -> None:
    script = rallyrun.script(USES.format(module="rallypoint.workers.timers", late="1", signal=""))
    flags = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", script]
    job = rallyrun(*flags, env=ON)
    assert job.ends() == 0, job.err
    assert re.search(RAN_OUT, job.err)
    assert "in hangs_here" in job.err
    done = [line.split() for line in job.out if line.startswith("done")]
    assert {rank for _, rank, _ in done} == {"0", "1"}
    assert all(path.startswith(str(rallyrun.folder)) for _, _, path in done)


@pytest.mark.torch
def test_a_worker_that_is_late_by_torch_s_timer_is_shown_and_killed(rallyrun: Launcher) -> None:
    """One worker that is not started again: torch is slow to import."""
    script = rallyrun.script(USES.format(module="torch.distributed.elastic.timer", late="0", signal=""))
    job = rallyrun("--standalone", script, env=ON)
    assert job.ends() == 1, job.err
    assert re.search(RAN_OUT, job.err)
    assert "in hangs_here" in job.err


def test_an_agent_that_is_killed_leaves_no_pipe(rallyrun: Launcher) -> None:
    job = rallyrun("--standalone", "--no-python", "sh", "-c", "echo up; sleep 1000", env=ON)
    job.until(lambda lines: "up" in lines, "the worker is up")
    assert any("watchdog_timer" in path for path in rallyrun.left_files())
    job.signal(signal.SIGKILL)
    assert job.ends() == -signal.SIGKILL


def test_a_worker_that_is_stuck_in_the_kernel_ends_the_job(rallyrun: Launcher) -> None:
    """It waits, in state D, for a child that cannot reach its own program."""
    pipe = str(rallyrun.folder / "held")
    os.mkfifo(pipe)
    script = rallyrun.script(
        "import os, sys\n"
        "actions = [(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)]\n"
        "os.posix_spawn(sys.executable, ['python'], {}, file_actions=actions)\n"
    )
    env = {"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "0.5"}
    job = rallyrun("--standalone", "--max-restarts=3", "--shutdown-timeout=1", script, pipe, env=env)
    assert job.ends() == 1
    assert "uninterruptible sleep (state D)" in job.err
    assert "are restarted" not in job.err
