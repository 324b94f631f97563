"""Jobs on one node, with real processes: failures, restarts and signals. Also run on an emulated machine."""

from __future__ import annotations

import os
import signal

from tests.jobs.launching import Launcher

UNTIL_KILLED = """
import os, sys, time
def say(*words):  # one write for a line: under -u, print makes two, and other workers come between
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
say("up", os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], os.getpid())
{body}
while True:
    time.sleep(0.02)  # a signal right before a longer sleep would not end it
"""


def ups(lines: list[str]) -> list[tuple[int, int, int]]:
    """(rank, restart count, pid) of each worker that has said that it is up."""
    found = [line.split() for line in lines if line.startswith("up ")]
    return [(int(rank), int(count), int(pid)) for _, rank, count, pid in found]


def test_a_killed_worker_is_restarted_with_all_others(rallyrun: Launcher) -> None:
    script = rallyrun.script(
        UNTIL_KILLED.format(body='if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1": sys.exit(0)')
    )
    job = rallyrun("--standalone", "--nproc-per-node=2", "--max-restarts=1", script)
    first = ups(job.until(lambda lines: len(ups(lines)) == 2, "two workers are up"))
    os.kill(first[1][2], signal.SIGKILL)
    assert job.ends() == 0, job.err
    assert sorted(up[:2] for up in ups(job.out)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert "exit code -9, SIGKILL" in job.err


def test_the_budget_ends_and_the_report_names_rank_host_signal_and_traceback(rallyrun: Launcher) -> None:
    body = 'if os.environ["RANK"] == "1":\n    raise ValueError("boom " + os.environ["TORCHELASTIC_RESTART_COUNT"])'
    job = rallyrun(
        "--standalone", "--nproc-per-node=2", "--max-restarts=1", rallyrun.script(UNTIL_KILLED.format(body=body))
    )
    assert job.ends() == 1
    report = job.err[job.err.index("FAILED\n") :]
    assert "rank      : 1 (local_rank: 1)" in report
    assert "exitcode  : 1 (pid: " in report
    assert 'raise ValueError("boom " + os.environ["TORCHELASTIC_RESTART_COUNT"])' in report
    assert "ValueError: boom 1" in report
    assert "Stopped by rallyrun: rank 0" in report
    assert job.err.count("Traceback (most recent call last)") == 3, "each worker's own, the report's, and none of ours"


def test_a_signal_is_passed_on_and_ends_the_agent(rallyrun: Launcher) -> None:
    body = """
import signal
import sys
def heard(*_):
    say("heard")
    sys.exit(0)
signal.signal(signal.SIGTERM, heard)
say("ready")
"""
    job = rallyrun("--standalone", "--nproc-per-node=2", rallyrun.script(UNTIL_KILLED.format(body=body)))
    job.until(lambda lines: lines.count("ready") == 2, "two workers are ready")
    job.signal(signal.SIGTERM)
    assert job.ends() == 1
    assert job.out.count("heard") == 2
    assert "Traceback" not in job.err
    assert "SIGTERM" in job.err


def test_restarts_without_progress_are_held_back(rallyrun: Launcher) -> None:
    job = rallyrun(
        "--standalone",
        "--max-restarts=2",
        "--rdzv-conf=restart_backoff=0.2",
        rallyrun.script(UNTIL_KILLED.format(body="print(time.monotonic(), flush=True)\nsys.exit(1)")),
    )
    assert job.ends() == 1
    starts = [float(line) for line in job.out if not line.startswith("up")]
    assert starts[1] - starts[0] >= 0.2
    assert starts[2] - starts[1] >= 0.4
