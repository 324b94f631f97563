"""What a real agent tells of its run: events on its standard error, and its health over HTTP."""

from __future__ import annotations

import json
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from rallypoint.base.endpoint import free_port
from tests.jobs.launching import Job, Launcher

SH = ("--no-python", "/bin/sh", "-c")


def events(job: Job) -> list[tuple[str, str, int | None]]:
    """Source, state and restarts of each event."""
    found = [json.loads(line) for line in job.err.splitlines() if line.startswith('{"name"')]
    return [(each["source"], each["metadata"]["state"], each["metadata"]["agent_restarts"]) for each in found]


def test_the_events_of_a_job_with_a_restart(rallyrun: Launcher) -> None:
    script = "exit $((1 - TORCHELASTIC_RESTART_COUNT))"
    job = rallyrun("--standalone", "--event-log-handler=console", "--max-restarts=1", *SH, script)
    assert job.ends() == 0
    round_ = [("AGENT", "RENDEZVOUS"), ("AGENT", "ASSIGN_WORKER_RANKS"), ("WORKER", "START")]
    assert events(job) == [
        *((source, state, 0) for source, state in round_),
        *((source, state, 1) for source, state in round_),
        ("WORKER", "SUCCEEDED", 1),
        ("AGENT", "SUCCEEDED", 1),
    ]


def test_a_worker_that_was_ended_is_no_failure(rallyrun: Launcher) -> None:
    job = rallyrun(
        "--standalone", "--event-log-handler=console", "--nproc-per-node=2", *SH, "test $RANK = 1 && exit 3; sleep 60"
    )
    assert job.ends() == 1
    assert events(job)[-3:] == [("WORKER", "TERMINATED", 0), ("WORKER", "FAILED", 0), ("AGENT", "SUCCEEDED", 0)]


def test_an_agent_that_is_ended_says_so(rallyrun: Launcher) -> None:
    job = rallyrun("--standalone", "--event-log-handler=console", *SH, "echo up; sleep 60")
    job.until(lambda lines: "up" in lines, "the worker is up")
    job.signal(signal.SIGTERM)
    assert job.ends() == 1
    assert events(job)[-1] == ("AGENT", "FAILED", 0)
    assert "SignalException" in job.err


def test_without_a_handler_there_are_none(rallyrun: Launcher) -> None:
    job = rallyrun("--standalone", *SH, "exit 0")
    assert job.ends() == 0
    assert job.err == ""


def test_an_unknown_handler_starts_nothing(rallyrun: Launcher) -> None:
    job = rallyrun("--standalone", "--event-log-handler=zz", *SH, "echo up")
    assert job.ends() == 1
    assert job.out == []
    assert "there is no event handler 'zz'; use one of console" in job.err


def ask(port: int, path: str) -> tuple[int, dict[str, object]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, json.load(refusal)


def shown_once(port: int, holds: Callable[[dict[str, object]], bool]) -> dict[str, object]:
    """The status once something holds of it: the agent shows itself when it next sleeps, and workers may be quicker."""
    deadline = time.monotonic() + 30
    while True:
        code, shown = ask(port, "/status")
        assert code == 200
        if holds(shown) or time.monotonic() > deadline:
            return shown
        threading.Event().wait(0.01)


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
    assert "there is no health check: port" in second.err
    first.signal(signal.SIGTERM)
    assert first.ends() == 1
