"""Reports of a real agent about its run: events on its standard error, and its health over HTTP."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rallypoint.observe.goodput import JobActivity, Loss, agent_runs, report
from rallypoint.observe.report import read_events
from rallypoint.observe.telemetry.agent_events import AgentEnded, NodePhase, ProgressMade
from tests.jobs.launching import Job, Launcher
from tests.ports import free_port
from tests.waiting import until

SH = ("--no-python", "/bin/sh", "-c")


def told(job: Job) -> list[dict[str, Any]]:
    """The events as they were written."""
    return [json.loads(line) for line in job.err.splitlines() if line.startswith('{"name"')]


def events(job: Job) -> list[tuple[str, str, int | None]]:
    """Source, state and restarts of each event."""
    return [(each["source"], each["metadata"]["state"], each["metadata"]["agent_restarts"]) for each in told(job)]


def test_how_each_worker_of_a_failed_job_ended(rallyrun: Launcher) -> None:
    """Rank 0 is ended, rank 1 fails once rank 2 has succeeded; the agent's own event tells the failure too."""
    script = """
        case $RANK in
            0) exec sleep 60 ;;
            2) echo $$ >unfinished; mv unfinished pid ;;
            1) until test -e pid; do sleep 0.02; done
               while kill -0 $(cat pid); do sleep 0.02; done
               exit 3 ;;
        esac"""
    job = rallyrun("--standalone", "--event-log-handler=console", "--nproc-per-node=3", *SH, script)
    assert job.ends() == 1
    ends = [(state, restarts) for source, state, restarts in events(job) if source == "WORKER"][-3:]
    assert ends == [("TERMINATED", 0), ("FAILED", 0), ("SUCCEEDED", 0)], job.err
    last = told(job)[-1]
    assert (last["source"], last["metadata"]["state"]) == ("AGENT", "FAILED")
    assert "exitcode  : 3" in last["metadata"]["raw_error"]


def test_an_agent_that_is_ended_says_so(rallyrun: Launcher) -> None:
    job = rallyrun("--standalone", "--event-log-handler=console", *SH, "echo up; sleep 60")
    job.until(lambda lines: "up" in lines, "the worker is up")
    job.signal(signal.SIGTERM)
    assert job.ends() == 1
    assert events(job)[-2:] == [("WORKER", "TERMINATED", 0), ("AGENT", "FAILED", 0)]
    assert "SignalException" in job.err


TELLS = """
import os, sys, time
from rallypoint import notices
first = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) * {back}
for step in range(first, first + 20):
    time.sleep(0.01)
    notices.progress(step)
sys.exit({code})
"""


def test_events_in_a_file_make_a_report(rallyrun: Launcher, tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    script = rallyrun.script(TELLS.format(back=10, code="int(first < 20)"))
    job = rallyrun(
        "--standalone", "--nproc-per-node=2", f"--event-log-handler=jsonl:{path}", "--max-restarts=5", script
    )
    assert job.ends() == 0
    assert not [line for line in job.err.splitlines() if line.startswith("{")]
    found = read_events([str(path)])
    assert found.notes == []
    (lines,) = found.events.values()
    kinds = [type(each).__name__ for each in lines]
    assert kinds[0] == "AgentStarted"
    assert kinds[-1] == "AgentEnded"
    assert [kinds.count(each) for each in ("RoundStarted", "WorkersStarted", "WorkerFailed", "RoundOver")] == [
        3,
        3,
        2,
        2,
    ]
    assert '"torchelastic.worker.status.START"' in path.read_text(), "torch's events are there too"
    made = report(agent_runs(lines))
    assert (made.outcome, made.failures, len(made.rounds)) == ("succeeded", 2, 3)
    assert [(each.first_step, each.step) for each in lines if isinstance(each, ProgressMade)][-1] == (20, 39)
    assert 0 < made.lost[Loss.LOST_WORK] < made.phases[JobActivity.RUNNING]
    last = lines[-1]
    assert isinstance(last, AgentEnded)
    assert sum(last.seconds.values()) == pytest.approx(last.elapsed)
    for phase in ("rendezvous", "starting", "running", "stopping", "held_back"):
        assert made.phases[JobActivity(phase)] == pytest.approx(last.seconds[NodePhase(phase)]), phase


def test_a_file_that_cannot_be_written_starts_nothing(rallyrun: Launcher) -> None:
    job = rallyrun("--standalone", "--event-log-handler=jsonl:/dev/null/e", *SH, "echo up")
    assert job.ends() == 1
    assert job.out == []
    assert "--event-log-handler: events cannot be written to /dev/null/e: Not a directory" in job.err


@pytest.mark.parametrize(("back", "ends"), [(0, "without progress (same_failure_limit)"), (20, "FAILED")])
def test_only_steps_that_no_round_had_reached_before_are_progress(rallyrun: Launcher, back: int, ends: str) -> None:
    """Though each round runs for longer than `min_healthy_time`, and though each takes steps."""
    job = rallyrun(
        "--standalone",
        "--max-restarts=4",
        "--rdzv-conf=same_failure_limit=2,min_healthy_time=0",
        rallyrun.script(TELLS.format(back=back, code=3)),
    )
    assert job.ends() == 1
    assert ends in job.err
    assert ("same_failure_limit" in job.err) == (back == 0)


def ask(port: int, path: str) -> tuple[int, dict[str, object]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, json.load(refusal)


def shown_once(port: int, holds: Callable[[dict[str, object]], bool]) -> dict[str, object]:
    """The status once something holds of it: the agent shows itself when it next sleeps, and workers may be quicker."""

    def shown() -> dict[str, object] | None:
        code, found = ask(port, "/status")
        assert code == 200
        return found if holds(found) else None

    return until(shown, "the status shows it")


def test_the_health_of_a_running_agent(rallyrun: Launcher) -> None:
    port = free_port()
    env = {"TORCHELASTIC_HEALTH_CHECK_PORT": str(port)}
    job = rallyrun("--standalone", "--nproc-per-node=2", "--role=trainer", *SH, "echo up; sleep 60", env=env)
    job.until(lambda lines: lines.count("up") == 2, "both workers are up")
    code, shown = ask(port, "/healthz")
    assert (code, shown["healthy"]) == (200, True)
    shown = shown_once(port, lambda status: status["group_world_size"] == 1)
    assert (shown["role"], shown["group_world_size"]) == ("trainer", 1)
    assert isinstance(shown["workers"], list)
    assert [each["global_rank"] for each in shown["workers"]] == [0, 1]
    job.signal(signal.SIGTERM)
    assert job.ends() == 1


def test_a_health_port_that_is_taken_costs_a_line(rallyrun: Launcher) -> None:
    env = {"TORCHELASTIC_HEALTH_CHECK_PORT": str(free_port())}
    first = rallyrun("--standalone", *SH, "echo up; sleep 60", env=env)
    first.until(lambda lines: "up" in lines, "the worker is up")
    second = rallyrun("--standalone", *SH, "exit 0", env=env)
    assert second.ends() == 0
    assert "the health check is off: cannot listen on port" in second.err
    first.signal(signal.SIGTERM)
    assert first.ends() == 1
