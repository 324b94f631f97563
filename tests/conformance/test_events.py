"""The events of one job that a plug-in receives, under real torchrun and under rallyrun."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import pytest

from tests.conformance.record import Record
from tests.conformance.test_compat_programs import AS_IT_IS, NO_TORCH, PROGRAMS, TORCHRUN, Change, site
from tests.jobs.launching import RALLYRUN, Launcher

pytestmark = pytest.mark.torch

Events = list[dict[str, Any]]

WORKER = """
import os, signal, sys, time
import torch.distributed.elastic.timer as timer
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(3)
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"], int(sys.argv[1])))
with timer.expires(after=60, scope="in time"):
    pass
with timer.expires(after=0.2, scope="late"):
    while "timer expired" not in open(os.environ["KEPT"]).read() or int(sys.argv[1]):
        time.sleep(0.01)
"""
"""Fails first; then lets a timer run out that only tells, and ends well once it has been told of; or one that kills."""


class Offer(NamedTuple):
    """A launcher, and how a handler of events is offered to it."""

    command: list[str]
    group: str
    entry: str
    change: Change


TORCHS = Offer(TORCHRUN, "torchrun.handlers", "kept = keeping:offer", AS_IT_IS)
OURS = Offer(RALLYRUN, "rallypoint.event_handlers", "kept = keeping:Kept", NO_TORCH)
PLACE = ["--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=job"]
FLAGS = [*PLACE, "--role=r", "--max-restarts=1"]


def heard(launcher: Launcher, offer: Offer, signal: int) -> Events:
    """All events of a job under one launcher, in the order in which they came."""
    script = launcher.script(WORKER)
    kept = launcher.folder / f"kept-{offer.group}"
    temporary = launcher.folder / f"tmp-{offer.group}"  # torch's agent leaves files there
    temporary.mkdir()
    env = {**site(launcher, offer.group, offer.entry, offer.change), "KEPT": str(kept)}
    env["TORCHELASTIC_ENABLE_FILE_TIMER"] = "1"
    if offer is TORCHS:
        env["TMPDIR"] = str(temporary)
    job = launcher.command([*offer.command, *FLAGS, "--event-log-handler=kept", script, str(signal)], env)
    assert (job.ends() == 0) == (signal == 0), job.err
    return [json.loads(line) for line in kept.read_text().splitlines()]


def torch_heard(launcher: Launcher, record: Record, signal: int) -> dict[str, Any]:
    """What there is to be compared of torch's events, live or recorded."""

    def ask() -> dict[str, Any]:
        events = heard(launcher, TORCHS, signal)
        return {"watchdog": of_watchdog(events), "agent": of_agent(events), "rendezvous": of_rendezvous(events)}

    question = [WORKER, (PROGRAMS / "keeping.py").read_text(), FLAGS, signal]
    told: dict[str, Any] = record.answer("events", f"signal {signal}", question, ask)
    return told


WATCHDOG = ("watchdog started", "watchdog stopped", "timer expired", "kill worker process")
MEASURED = ("worker_pid", "expiration_time")


def of_watchdog(events: Events) -> Events:
    """Its events without what differs from run to run."""
    found = []
    for event in events:
        if event["name"] in WATCHDOG:
            about = json.loads(event["metadata"]["metadata"])
            numbers = {name: re.sub(r"\d+", "N", about[name]) for name in MEASURED if name in about}
            alike = {"metadata": {**about, **numbers}, "hostname": bool(event["metadata"]["hostname"])}
            times = {"timestamp": 0, "metadata": {**event["metadata"], **alike, "total_run_time": 0}}
            found.append({**event, **times})
    return found


FIRST_FAILURE = "torchelastic.worker.status.FAILED WORKER 0"
"""Torch tells failures of the last round only."""


def of_agent(events: Events) -> list[str]:
    """What the agent and its workers have come to, in no order."""
    named = [event for event in events if event["name"].startswith("torchelastic.worker.status.")]
    return sorted(f"{each['name']} {each['source']} {each['metadata']['agent_restarts']}" for each in named)


STEPS_OF_TORCH = ("_add_to_participants", "_keep_alive", "_mark_rendezvous_complete", "_mark_rendezvous_closed", "run")
"""What torch's nodes do to the state that they share; ours have no such steps, and tell of none."""


def of_rendezvous(events: Events) -> list[list[Any]]:
    """What happened to the node, without what differs from run to run, nor words of which the contract says nothing."""
    found = []
    for event in events:
        if "node_state" in event and event["name"].rpartition(".")[2] not in STEPS_OF_TORCH:
            assert event["hostname"]
            assert str(event["pid"]) in event["message"]
            words = re.sub(r"'[^']*_\d+_0'", "NODE", event["message"]).removesuffix(" Pending sync.")
            words = re.sub(r"Process \d+ hosts .*|(?<='job')(\.|: the job has succeeded\.)$", "", words)
            found.append([event[name] for name in ("name", "run_id", "node_state", "rank", "local_id", "error_trace")])
            found[-1].append(words)
    return found


def test_what_a_plug_in_hears_of_a_job_that_succeeds(launcher: Launcher, record: Record) -> None:
    theirs, ours = torch_heard(launcher, record, signal=0), heard(launcher, OURS, signal=0)
    assert of_watchdog(ours) == theirs["watchdog"]
    assert [each["name"] for each in of_watchdog(ours)] == [*WATCHDOG[:2], WATCHDOG[0], WATCHDOG[2], WATCHDOG[1]]
    assert of_agent(ours) == sorted([*theirs["agent"], FIRST_FAILURE])
    assert sorted(of_rendezvous(ours), key=str) == sorted(theirs["rendezvous"], key=str)
    assert [each[-1] for each in of_rendezvous(ours) if each[-1]] == [
        "The node NODE attempts to join the next round of the rendezvous 'job'",
        "The node NODE has joined round 0 of the rendezvous 'job' as rank 0 in a world of size 1.",
        "The node NODE attempts to join the next round of the rendezvous 'job'",
        "The node NODE removed itself from the participants of round 0 of the rendezvous 'job'",
        "The node NODE has joined round 1 of the rendezvous 'job' as rank 0 in a world of size 1.",
        "The node NODE has closed the rendezvous 'job'",
    ]


def test_what_a_plug_in_hears_of_a_worker_that_is_killed(launcher: Launcher, record: Record) -> None:
    """Torch's agent dies of the same signal, so that nothing more is told there; ours says how it ends."""
    ours = heard(launcher, OURS, signal=9)
    killed = torch_heard(launcher, record, signal=9)["watchdog"]
    assert killed[-1]["name"] == "kill worker process"
    assert of_watchdog(ours)[: len(killed)] == killed
    assert ours[-1]["name"] == "torchelastic.worker.status.FAILED"
    assert [each["metadata"]["state"] for each in ours if each.get("source") == "WORKER"][-1] == "FAILED"


def test_nothing_is_told_to_nobody(launcher: Launcher) -> None:
    """Without a handler of their own, the events of the rendezvous are not made, nor what would make them imported."""
    program = (
        "import sys\nfrom rallypoint.cli.rallyrun import main\nmain(sys.argv[1:])\n"
        "print([name for name in sys.modules if name.startswith('rallypoint.observe.telemetry.')])"
    )
    script = launcher.script("")
    job = launcher.command([RALLYRUN[0], "-c", program, "--standalone", script])
    assert job.ends() == 0, job.err
    assert job.out == ["['rallypoint.observe.telemetry.lazy']"]
