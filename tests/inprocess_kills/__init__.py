"""Kills workers and agents of a job that trains in process, at random moments, and reports how the job ended.

Each agent is a node with one worker, or several; a killed agent is started again. The control plane is on no node, so
any of them may be killed.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests import without_compiler
from tests.jobs.launching import RALLYCTL, RALLYRUN, Job, Launcher
from tests.ports import free_port
from tests.processes import below

EXAMPLES = Path(__file__).parents[2] / "examples"
PRELOAD = "--preload=torch,torch._dynamo"
STANDBY = "--standby=1"
SILENCE = 120.0
"""Seconds without any event after which the job is taken to be stuck."""

Event = dict[str, Any]


class Plan(NamedTuple):
    """What is to be done."""

    kills: int
    nodes: int
    least: int
    workers: int
    steps: int
    batch: int
    seed: int
    agents: float
    """Which part of the kills hits an agent, and so all of its node."""
    at_once: float = 0.25
    """Which part of them comes while the job recovers from the one before."""
    flag: str = PRELOAD
    """What new workers are made ready by."""


class Outcome(NamedTuple):
    """How it ended."""

    loss: float
    killed_workers: int
    killed_agents: int
    processes: int
    """Workers that were ever started."""
    kept: int
    """How often a worker went on in another round."""
    entered: int
    """How often a standby worker took the place of one."""
    rounds: int
    lost_steps: int
    """Steps that were finished, and had to be done again."""
    recoveries: list[float]
    """Seconds from a kill to the next finished step."""
    log: str


class Kills:
    """One job."""

    def __init__(self, rallyrun: Launcher, plan: Plan) -> None:
        self._rallyrun = rallyrun
        self._plan = plan
        self._random = random.Random(plan.seed)
        pipe = rallyrun.folder / "progress"
        os.mkfifo(pipe)
        self._pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        self._pending = b""
        self._pids: dict[int, int] = {}
        """Of the present workers, by rank."""
        self._seen: set[int] = set()
        self._kept = self._rounds = self._lost = self._last = 0
        self._jobs: list[Job] = []
        self._agents: list[Job] = []
        self._killed = {"worker": 0, "agent": 0}
        port = free_port()
        self._command = [
            *RALLYRUN,
            f"--nnodes={plan.least}:{plan.nodes}",
            f"--nproc-per-node={plan.workers}",
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=kills"),
            *("--rdzv-conf=is_host=false,last_call_timeout=1", "--max-restarts=1000", plan.flag),
            str(EXAMPLES / "train_ddp_inprocess.py"),
            *(f"--steps={plan.steps}", f"--batch={plan.batch}", "--every=1000000", f"--progress={pipe}"),
        ]
        self._server = rallyrun.command([*RALLYCTL, "serve", "--endpoint", f"127.0.0.1:{port}"])
        self._server.until_err("control plane listens at")

    def run(self) -> Outcome:
        """Train to the end.

        Raises:
            AssertionError: the job is stuck, or has failed.
        """
        for _ in range(self._plan.nodes):
            self._agents.append(self._start())
        between = max(2, self._plan.steps // (self._plan.kills + 1))
        recoveries, killed_at = [], None
        due, steps = between, 0
        for event in self._events():
            if event["event"] == "done":
                break
            if event["event"] != "step":
                continue
            steps += 1
            if killed_at is not None:
                recoveries.append(time.monotonic() - killed_at)
                killed_at = None
            if steps >= due and sum(self._killed.values()) < self._plan.kills:
                due = steps + between - self._random.randrange(between // 2 + 1)
                self._await_standby_workers()
                killed_at = self._kill()
        loss = event["loss"]
        for agent in self._agents:
            assert agent.ends() == 0, agent.err
        self._server.stop()
        os.close(self._pipe)
        log = "\n".join(line for job in self._jobs for line in (*job.out, job.err))
        counts = self._killed["worker"], self._killed["agent"], len(self._seen)
        entered = log.count("a standby worker is taking over as")
        return Outcome(loss, *counts, self._kept, entered, self._rounds, self._lost, recoveries, log)

    def _await_standby_workers(self) -> None:
        """One of each node, which takes seconds, in which a job that goes on would come to its end.

        Not while a node has no worker in the round: its agent has just been started, and the round will end for it.
        """
        training = set(self._pids.values())
        if self._plan.flag != STANDBY or not all(training.intersection(below(agent.pid)) for agent in self._agents):
            return
        os.kill(self._pids[0], signal.SIGSTOP)
        try:
            for agent in self._agents:
                agent.until_err("a standby worker is ready", 1 + agent.err.count("a standby worker is taking over as"))
        finally:
            os.kill(self._pids[0], signal.SIGCONT)

    def _kill(self) -> float:
        """Some of those that live, at some moment of a step, and perhaps again soon after; returns when."""
        time.sleep(self._random.random() * 0.02)
        at = time.monotonic()
        self._kill_one()
        while sum(self._killed.values()) < self._plan.kills and self._random.random() < self._plan.at_once:
            time.sleep(self._random.random() * self._random.choice([0.0, 0.05, 0.5]))
            self._kill_one()
        return at

    def _kill_one(self) -> None:
        if self._random.random() < self._plan.agents:
            number = self._random.randrange(len(self._agents))
            self._killed["agent"] += 1
            self._agents[number].signal(signal.SIGKILL)
            self._agents[number].ends()
            self._agents[number] = self._start()
        else:
            self._killed["worker"] += 1
            # One of an earlier round may have ended since, and one of this round may have been killed a moment ago.
            alive = sorted(set(self._rallyrun.pids()) & set(self._pids.values()))
            if alive:
                with suppress(ProcessLookupError):
                    os.kill(self._random.choice(alive), signal.SIGKILL)

    def _start(self) -> Job:
        job = self._rallyrun.command(self._command, {**without_compiler.ENVIRONMENT, "OMP_NUM_THREADS": "1"})
        self._jobs.append(job)
        return job

    def _events(self) -> Iterator[Event]:
        while True:
            ready, _, _ = select.select([self._pipe], [], [], SILENCE)
            stuck = f"nothing happened for {SILENCE:.0f} s\n" + "\n".join(job.err for job in self._jobs)
            assert ready, stuck
            *lines, self._pending = (self._pending + os.read(self._pipe, 65536)).split(b"\n")
            for line in lines:
                event: Event = json.loads(line)
                self._note(event)
                yield event

    def _note(self, event: Event) -> None:
        """What becomes of processes, rounds and steps."""
        if event["event"] == "training":
            self._pids[event["rank"]] = event["pid"]
            self._kept += event["pid"] in self._seen
            self._seen.add(event["pid"])
            if event["rank"] == 0:
                self._rounds += 1
                self._lost += max(0, self._last - event["step"])
        elif event["event"] == "step":
            self._last = event["step"]
