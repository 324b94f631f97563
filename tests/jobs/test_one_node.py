"""Jobs on one node, with real processes: what workers get, what becomes of failures, signals and output."""

from __future__ import annotations

import json
import os
import re
import signal

from tests.jobs.launching import Launcher

SHOW = """
import json, os, sys
os.write(1, json.dumps({"argv": sys.argv, "env": dict(os.environ)}).encode() + b"\\n")
"""

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


def test_workers_find_their_ranks_and_arguments(rallyrun: Launcher) -> None:
    job = rallyrun(
        "--standalone", "--nproc-per-node=3", "--role=trainer", rallyrun.script(SHOW), "--x", "${local_rank}"
    )
    assert job.ends() == 0
    workers = sorted((json.loads(line) for line in job.out), key=lambda each: int(each["env"]["RANK"]))
    assert [each["env"]["RANK"] for each in workers] == ["0", "1", "2"]
    for rank, each in enumerate(workers):
        assert each["argv"][1:] == ["--x", str(rank)]
        env = each["env"]
        assert (env["LOCAL_RANK"], env["WORLD_SIZE"], env["ROLE_NAME"]) == (str(rank), "3", "trainer")
        assert env["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert env["MASTER_ADDR"] == "127.0.0.1"


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


def test_one_worker_may_finish_early(rallyrun: Launcher) -> None:
    script = rallyrun.script(
        """
import os, sys, pathlib, time
flag = pathlib.Path("finished")
if os.environ["RANK"] == "0":
    flag.write_text("")
    sys.exit(0)
while not flag.exists():
    time.sleep(0.01)
print("late but well")
"""
    )
    job = rallyrun("--standalone", "--nproc-per-node=2", script)
    assert job.ends() == 0
    assert job.out == ["late but well"]


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


def test_what_a_worker_leaves_in_its_group_goes_with_it(rallyrun: Launcher) -> None:
    script = rallyrun.script("import subprocess\nsubprocess.Popen(['sleep', '600'])\n")
    assert rallyrun("--standalone", script).ends() == 0  # the fixture finds what is left


def test_streams_go_where_the_flags_say(rallyrun: Launcher) -> None:
    script = rallyrun.script('import os\nos.write(1, b"to out\\n")\nos.write(2, b"to err\\n")\n')
    logs = rallyrun.folder / "logs"
    job = rallyrun(f"--log-dir={logs}", "--standalone", "--nproc-per-node=2", "--rdzv-id=x", "-r=0:1", "-t=1:3", script)
    assert job.ends() == 0
    files = {str(path.relative_to(logs)): path for path in logs.rglob("*") if path.is_file()}
    kept = {re.sub(r"^[^/]+/", "", name): path.read_text() for name, path in files.items()}
    assert kept == {
        "attempt_0/0/stdout.log": "to out\n",
        "attempt_0/1/stdout.log": "to out\n",
        "attempt_0/1/stderr.log": "to err\n",
    }
    assert job.out == ["[default1]:to out"]
    assert sorted(line for line in job.err.split("\n") if "to err" in line) == ["[default1]:to err", "to err"]


def test_the_rank_filter_shows_what_was_asked_for(rallyrun: Launcher) -> None:
    script = rallyrun.script('import os\nprint("rank", os.environ["RANK"])\n')
    job = rallyrun("--standalone", "--nproc-per-node=3", "--local-ranks-filter=1", script)
    assert job.ends() == 0
    assert job.out == ["rank 1"]


def test_the_log_at_info_tells_what_happens(rallyrun: Launcher) -> None:
    job = rallyrun("--standalone", rallyrun.script("pass"), env={"LOGLEVEL": "INFO"})
    assert job.ends() == 0
    facts = [
        "--rdzv-backend=c10d",
        "entrypoint",
        "Rendezvous'ing worker group",
        "Rendezvous complete",
        "restart_count=0",
        "Starting worker group",
        "Local worker group finished",
        "Done waiting for other agents",
    ]
    places = [job.err.find(fact) for fact in facts]
    assert -1 not in places, dict(zip(facts, places, strict=True))
    assert places == sorted(places)


def test_the_same_failure_again_and_again_ends_the_job_before_the_budget_does(rallyrun: Launcher) -> None:
    job = rallyrun(
        "--standalone",
        "--max-restarts=50",
        "--rdzv-conf=same_failure_limit=2,restart_backoff=0.05",
        rallyrun.script(UNTIL_KILLED.format(body='raise ValueError("no such data set")')),
    )
    assert job.ends() == 1
    assert [up[1] for up in ups(job.out)] == [0, 1, 2]
    assert "the same failure came back 2 times without progress" in job.err
    assert "ValueError: no such data set" in job.err


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
