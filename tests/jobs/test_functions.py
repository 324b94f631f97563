"""Jobs whose workers are functions, from a user's program."""

from __future__ import annotations

import json
import signal
import sys

import pytest

from tests.jobs.launching import Launcher

PROGRAM = """
import json, os, sys, time
from pathlib import Path
from rallypoint import LaunchConfig, elastic_launch
from rallypoint.workers.logs.specs import DefaultLogsSpecs

def told(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def train(base):
    rank = int(os.environ["RANK"])
    return {"rank": rank, "value": base + rank, "restarts": os.environ["TORCHELASTIC_RESTART_COUNT"]}

def fails_once(base):
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("the first time")
    return train(base)

def hangs(base):
    told("up", os.getpid())
    time.sleep(600)

def waits_for_sigterm(base):
    import signal
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    told("up", os.getpid())
    while True:
        time.sleep(0.02)  # a signal right before a pause would not end it

def main(method, *launches):
    for launch in launches:
        function, restarts = launch.split(":")
        config = LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="job",
                              max_restarts=int(restarts), start_method=method, logs_specs=DefaultLogsSpecs("logs"))
        print("result", json.dumps(elastic_launch(config, globals()[function])(10)), flush=True)

if __name__ == "__main__":
    main(*sys.argv[1:])
"""

WITHOUT_A_GUARD = """
from rallypoint import LaunchConfig, elastic_launch
from rallypoint.workers.logs.specs import DefaultLogsSpecs
def train():
    return 1
config = LaunchConfig(1, 1, 1, rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="job", max_restarts=0,
                      logs_specs=DefaultLogsSpecs("logs"))
elastic_launch(config, train)()
"""


def program(rallyrun: Launcher, *arguments: str) -> list[str]:
    return [sys.executable, rallyrun.script(PROGRAM, "program.py"), *arguments]


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_values_by_global_rank_and_a_failure_with_its_traceback(rallyrun: Launcher, method: str) -> None:
    """Three launches of one program: without a failure, with one that is made good, and with one that is not."""
    job = rallyrun.command(program(rallyrun, method, "train:0", "fails_once:1", "fails_once:0"))
    assert job.ends() == 1, job.err
    results = [json.loads(line.removeprefix("result ")) for line in job.out if line.startswith("result ")]
    assert results == [
        {str(rank): {"rank": rank, "value": 10 + rank, "restarts": restarts} for rank in (0, 1)} for restarts in "01"
    ]
    report = job.err[job.err.index("fails_once FAILED") :]
    assert "rank      : 1 (local_rank: 1)" in report
    assert "ValueError: the first time" in report
    assert "in fails_once" in report


def test_sigkill_to_the_agent_leaves_nothing(rallyrun: Launcher) -> None:
    job = rallyrun.command(program(rallyrun, "forkserver", "hangs:0"))
    lines = job.until(lambda lines: len(lines) == 2, "both workers are up")
    job.signal(signal.SIGKILL)
    assert job.ends() == -signal.SIGKILL
    for line in lines:
        rallyrun.until_gone(int(line.split()[1]))


def test_sigterm_to_the_agent_is_handed_on(rallyrun: Launcher) -> None:
    job = rallyrun.command(program(rallyrun, "spawn", "waits_for_sigterm:0"))
    job.until(lambda lines: len(lines) == 2, "both workers are up")
    job.signal(signal.SIGTERM)
    assert job.ends() != 0
    assert "SignalException" in job.err
    assert "did not end" not in job.err


def test_a_main_module_without_a_guard_is_told_so(rallyrun: Launcher) -> None:
    job = rallyrun.command([sys.executable, rallyrun.script(WITHOUT_A_GUARD)])
    assert job.ends() == 1
    assert "__name__ == '__main__'" in job.err
