"""`rallyctl drill`: running jobs lose workers, nodes and connections on purpose, and the table is correct."""

from __future__ import annotations

import json
import signal
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rallypoint.observe.report import read_events
from rallypoint.observe.telemetry.agent_events import OperatorActed, RoundOver, WorkerFailed
from tests import without_compiler
from tests.jobs.launching import RALLYCTL, AtOnce, Job, Launcher
from tests.jobs.test_control_plane import serve
from tests.ports import free_port

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "train_ddp.py")
SLACK = 2.0
"""Seconds by which two processes may be late on a busy machine: what is compared is seconds apart."""

IN_STEP = """
import json, os, pathlib, time
from rallypoint import notices
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
saved, here = pathlib.Path("saved"), pathlib.Path("met" + os.environ["MASTER_PORT"])
here.mkdir(exist_ok=True)
first = int(saved.read_text()) + 1 if saved.exists() else 1

def write(path, text):
    draft = path.with_name(f"{path.name}.{rank}.{os.getpid()}")
    draft.write_text(text)
    os.replace(draft, path)

def reached(each):
    path = here / str(each)
    return int(path.read_text()) if path.exists() else 0

with open("steps.jsonl", "ab", buffering=0) as log:
    for step in range(first, 1_000_000):
        write(here / str(rank), str(step))
        while any(reached(each) < step for each in range(world)):
            time.sleep(0.005)
        time.sleep(0.02)
        notices.progress(step)
        if rank == 0:
            log.write(json.dumps([os.getpid(), step, time.time()]).encode() + b"\\n")
            if step % 40 == 0:
                write(saved, str(step))
"""
"""Workers that make each step together, from the last checkpoint on; rank 0 writes when each was made."""

TRAINER = """
import pathlib, time
saved = pathlib.Path("checkpoint")
first = int(saved.read_text()) + 1 if saved.exists() else 1
for step in range(first, 1_000_000):
    time.sleep(0.05)
    print(f"{{'loss': {1 / step:.4f}, 'step': {step}}}", flush=True)
    if step % 10 == 0:
        saved.write_text(str(step))
"""
"""A loop as trainers have it, which knows nothing of us: it prints its loss, and resumes from its checkpoint."""


class Drilled(NamedTuple):
    code: int
    result: dict[str, Any]
    err: str

    @property
    def trials(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.result["trials"]
        return found


class Drilling:
    """A job of several nodes, and who drills it."""

    def __init__(self, rallyrun: Launcher, script: str, *flags: str, nodes: int, outside: bool = True) -> None:
        port = free_port()
        self._rallyrun = rallyrun
        self._endpoint = f"127.0.0.1:{port}"
        self.events = [rallyrun.folder / f"events-{number}.jsonl" for number in range(nodes)]
        if outside:
            self.server = serve(rallyrun, port)
        rendezvous = ("--rdzv-backend=c10d", "--rdzv-id=job", f"--rdzv-endpoint={self._endpoint}")
        host = ("--rdzv-conf=is_host=false",) if outside else ()
        self.agents: list[Job] = [
            rallyrun(
                *(*rendezvous, *host, "--max-restarts=20", f"--event-log-handler=jsonl:{path}", *flags),
                *script.split(),
                env=without_compiler.ENVIRONMENT,
            )
            for path in self.events
        ]

    def makes_steps(self, seen: str = "progress") -> None:
        """Wait until the round runs and its workers have made steps."""
        while True:
            asking = self._rallyrun.command([*RALLYCTL, "status", self._endpoint, "--rdzv-id=job", "--json"])
            if asking.ends() == 0:
                status = json.loads("\n".join(asking.out))
                workers = [each["workers"] or {} for each in status["nodes"] if each["group_rank"] is not None]
                if workers and all(_has(each, seen) for each in workers):
                    return
            assert any(each.pid for each in self.agents)

    def drill(self, *words: str) -> Drilled:
        command = [*RALLYCTL, "drill", self._endpoint, "--rdzv-id=job", "--json", "--within=60", *words]
        job = self._rallyrun.command(command)
        code = job.ends()
        return Drilled(code, json.loads("\n".join(job.out)), job.err)

    def stop(self) -> None:
        assert self._rallyrun.command([*RALLYCTL, "stop", self._endpoint, "--rdzv-id=job"]).ends() == 0


def _has(workers: dict[str, Any], seen: str) -> bool:
    if seen == "output":
        return any(each is not None for each in workers.get("output_seconds_ago", ()))
    return workers.get("first_step") is not None


def rounds_of_steps(folder: Path) -> list[list[tuple[int, float]]]:
    """The steps and their times that rank 0 has written, one list for each process that was rank 0."""
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return [[(step, at) for _, step, at in each] for _, each in groupby(lines, key=lambda line: line[0])]


def the_table_says_what_events_and_workers_say(rallyrun: Launcher) -> None:
    job = Drilling(rallyrun, rallyrun.script(IN_STEP), "--nnodes=2", "--nproc-per-node=2", nodes=2)
    job.makes_steps()
    done = job.drill("--kill=worker", "--times=3", "--every=3", "--seed=7")
    job.stop()
    assert (done.code, done.result["survived"], done.result["succeeded"]) == (0, 3, True), done
    made = rounds_of_steps(rallyrun.folder)
    runs = read_events([str(each) for each in job.events]).events.values()
    found = sorted((each for run in runs for each in run), key=lambda each: each.time)
    drilled = [each for each in found if isinstance(each, OperatorActed) and "drills kill worker" in each.text]
    failed = [each for each in found if isinstance(each, WorkerFailed)]
    assert len(drilled) == 2 * len(failed) == 6, "every node tells who has done it, and one worker fails each time"
    for trial, begun, failure, (before, after) in zip(done.trials, drilled[::2], failed, pairwise(made), strict=True):
        assert f"rank {trial['rank']} on {trial['node']}" in begun.text
        assert failure.failure.rank == trial["rank"]
        assert failure.failure.exit_code == -9
        assert (trial["survived"], trial["restarts"], trial["seen_by"]) == (True, 1, "progress")
        (last, _), (first, came) = before[-1], after[0]
        # The rank 0 that is killed may have reported a step that it has not written.
        assert trial["steps_lost"] - (last + 1 - first) in (0, 1), (trial, last, first)
        assert trial["step_is_exact"]
        assert trial["detected_seconds"] == pytest.approx(failure.time - begun.time, abs=SLACK)
        assert trial["step_seconds"] == pytest.approx(came - begun.time, abs=SLACK)
        assert trial["detected_seconds"] <= trial["round_seconds"] <= trial["step_seconds"]


def nodes_are_cut_off_paused_and_killed(rallyrun: Launcher) -> None:
    job = Drilling(rallyrun, rallyrun.script(IN_STEP), "--nnodes=2:3", "--nproc-per-node=1", nodes=3)
    job.makes_steps()
    for words, detected in (
        (["--pause=1"], False),
        (["--cut=0.5"], False),
        (["--cut=8"], True),
        (["--pause=8", "--node=0"], True),
    ):
        done = job.drill(*words)
        assert done.code == 0, (words, done)
        (trial,) = done.trials
        assert trial["restarts"] == 0
        if detected:  # what passes within the lease may still be found on a machine that is busier than that
            assert trial["detected_seconds"] is not None, done
            assert trial["step_seconds"] >= trial["detected_seconds"]
        job.makes_steps()
    done = job.drill("--kill=node")
    while done.code == 1:  # the one that was paused has not come back yet, and no more than the minimum are there
        done = job.drill("--kill=node")
    (trial,) = done.trials
    assert (done.code, trial["restarts"], trial["detected_seconds"] > 1.0) == (0, 0, True), done
    (victim,) = [each for each in job.agents if f"pid {each.pid} " in trial["node"]]
    assert victim.ends() == -signal.SIGKILL
    refused = job.drill("--kill=agent")
    assert (refused.code, refused.trials) == (1, [])
    assert "leaves 1 node, but the job needs 2" in refused.result["stopped"]
    job.stop()


def a_hang_is_found_and_the_worker_goes_on_where_it_is_only_reported(rallyrun: Launcher) -> None:
    flags = ("--nnodes=1", "--nproc-per-node=2", "--hang-timeout=2", "--log-dir=logs")
    job = Drilling(rallyrun, rallyrun.script(IN_STEP), *flags, nodes=1, outside=False)
    job.makes_steps()
    done = job.drill("--hang")
    (trial,) = done.trials
    assert (done.code, trial["restarts"], trial["steps_lost"]) == (0, 0, 0), done
    assert trial["detected_seconds"] >= 1.0
    job.agents[0].until_err("stopped by a signal")
    refused = job.drill("--kill=agent", "--force")
    assert (refused.code, refused.trials) == (1, [])
    assert "hosts the control plane" in refused.result["stopped"]
    assert "more times might end the job" in job.drill("--kill=worker", "--times=21").result["stopped"]
    job.stop()


def a_loop_that_knows_nothing_of_us_is_measured_by_its_output(rallyrun: Launcher) -> None:
    flags = ("--nnodes=1", "--nproc-per-node=1", "--max-restarts=1", "--redirects=3", "--log-dir=logs")
    job = Drilling(rallyrun, rallyrun.script(TRAINER), *flags, nodes=1, outside=False)
    job.makes_steps("output")
    done = job.drill("--kill=worker", "--times=1")
    (trial,) = done.trials
    assert (done.code, trial["survived"], trial["seen_by"], trial["steps_lost"]) == (0, True, "output", None), done
    assert not trial["step_is_exact"]
    assert trial["round_seconds"] <= trial["step_seconds"]
    refused = job.drill("--kill=worker")
    assert refused.code == 1, "its only restart is used"
    forced = job.drill("--kill=worker", "--force")
    assert (forced.code, forced.result["survived"]) == (4, 0), forced
    assert forced.trials[0]["note"], "the job has failed, and its control plane is gone with it"
    assert job.agents[0].ends() == 1


def test_jobs_are_drilled(at_once: AtOnce) -> None:
    at_once(
        the_table_says_what_events_and_workers_say,
        nodes_are_cut_off_paused_and_killed,
        a_hang_is_found_and_the_worker_goes_on_where_it_is_only_reported,
        a_loop_that_knows_nothing_of_us_is_measured_by_its_output,
    )


@pytest.mark.torch
def test_the_training_example_survives_a_drill(rallyrun: Launcher) -> None:
    script = f"{EXAMPLE} --steps=100000 --checkpoint-dir={rallyrun.folder / 'checkpoint'}"
    job = Drilling(rallyrun, script, "--nnodes=1:2", "--nproc-per-node=1", nodes=2)
    job.makes_steps()
    done = job.drill("--kill=worker", "--times=2", "--every=1")
    assert (done.code, done.result["survived"]) == (0, 2), done
    assert all(each["seen_by"] == "progress" and each["steps_lost"] is not None for each in done.trials)
    lost = job.drill("--kill=agent")
    assert (lost.code, lost.result["survived"]) == (0, 1), lost
    overs = [each for path in job.events for run in read_events([str(path)]).events.values() for each in run]
    assert {each.reason for each in overs if isinstance(each, RoundOver)} >= {"failure", "lost"}
    job.stop()
