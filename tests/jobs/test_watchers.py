"""Nothing that watches a job can hurt it (law 15).

Each watcher fails in each way while a worker is killed, and the job recovers as usual. The list of watchers comes from
the product (`broken_watchers`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.jobs.broken_watchers import BESIDE, FAULTS, HANG, NOT_ON_LOOP
from tests.jobs.launching import RALLYCTL, RALLYRUN, AtOnce, Job, Launcher
from tests.waiting import until

WORKER = """
import os, sys, time
restart, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
print("a line of output", flush=True)
print("and of errors", file=sys.stderr, flush=True)
with open("starts", "a") as file:
    file.write(f"{restart} {rank} {os.getpid()}\\n")
while True:
    time.sleep(0.05)
    print("alive", flush=True)
"""
OPTIONS = (
    *("--standalone", "--nproc-per-node=2", "--max-restarts=9", "--tee=3", "--log-dir=logs"),
    *("--incident-dir=incidents", "--hang-timeout=0.4", "--event-log-handler=jsonl:events.jsonl"),
)
"""All that watches and can be asked for; the workers write, so that none of them hangs."""
VERBS = (("status",), ("status", "--json"), ("stacks",), ("logs",), ("bundle", "--output=bundle"), ("events",))
REGROUPS = HANG / 6
"""Seconds for a restart, which takes 0.1: what waits for a watcher that hangs takes all of its time."""


class Watched:
    """A job with broken watchers."""

    def __init__(self, rallyrun: Launcher, fault: str, watcher: str) -> None:
        self._folder = rallyrun.folder
        self._rallyrun = rallyrun
        script = rallyrun.script(WORKER)
        program = [sys.executable, "-m", "tests.jobs.broken_watchers", fault, watcher, "record"]
        root = {"PYTHONPATH": str(Path(__file__).parents[2]), "LOGLEVEL": "INFO", "TORCHELASTIC_HEALTH_CHECK_PORT": "0"}
        self.job: Job = rallyrun.command([*program, *OPTIONS, script], root)
        self.pid = self.job.pid

    def says(self) -> str:
        """What the agent has printed."""
        return self.job.err[-3000:]

    def pids(self, restart: int, seconds: float = 120.0) -> list[int]:
        """The workers of a start, once all of them run."""

        def found() -> list[int] | None:
            path = self._folder / "starts"
            rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
            pids = [int(pid) for count, _, pid in rows if int(count) == restart]
            return pids if len(pids) == 2 else None

        return until(found, lambda: f"restart {restart}: {self.says()}", seconds)

    def watch(self) -> list[subprocess.Popen[bytes]]:
        """All verbs that look at the job. Where a watcher is broken, they may wait for an answer."""
        env, quiet = self._rallyrun.environment(), subprocess.DEVNULL
        name = str(self.pid)
        return [
            subprocess.Popen([*RALLYCTL, verb, name, *more], env=env, cwd=self._folder, stdout=quiet, stderr=quiet)
            for verb, *more in VERBS
        ]

    def survives(self) -> None:
        """Workers are killed while the job is looked at: it regroups as fast as ever."""
        watchers: list[subprocess.Popen[bytes]] = []
        try:
            for restart in range(2):
                victim = self.pids(restart)[restart]
                watchers += self.watch()
                os.kill(victim, signal.SIGKILL)
                self.pids(restart + 1, REGROUPS)
        finally:
            for each in watchers:
                each.kill()
                each.wait()

    def seen(self) -> list[str]:
        """The watchers that were used."""
        return (self._folder / "record").read_text().splitlines()


FLOODS = """
import os, sys
with open("starts", "a") as file:
    file.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {os.environ['RANK']} {os.getpid()}\\n")
while True:
    os.write(2, b"x" * 99 + b"\\n")
"""


class Unread(Watched):
    """A job whose console nobody reads, while its workers write as much as they can and verbs look at it."""

    def __init__(self, rallyrun: Launcher) -> None:
        self._folder, self._rallyrun = rallyrun.folder, rallyrun
        self._reading, writing = os.pipe()
        command = [*RALLYRUN, *OPTIONS, rallyrun.script(FLOODS)]
        self._agent = subprocess.Popen(
            command, stdout=writing, stderr=writing, env=rallyrun.environment({"LOGLEVEL": "INFO"}), cwd=rallyrun.folder
        )
        os.close(writing)
        self.pid = self._agent.pid

    def says(self) -> str:
        return "(nobody reads it)"

    def ends(self) -> None:
        self._agent.terminate()
        with open(self._reading, "rb") as console:  # now somebody does, or the report would wait
            console.read()
        self._agent.wait(120)


def test_a_job_survives_a_console_that_nobody_reads(rallyrun: Launcher) -> None:
    job = Unread(rallyrun)
    try:
        job.survives()
    finally:
        job.ends()


def surviving(fault: str, watcher: str) -> Callable[[Launcher], None]:
    """The scenario of `run_at_once` in which this watcher fails so."""

    def scenario(rallyrun: Launcher) -> None:
        Watched(rallyrun, fault, watcher).survives()

    scenario.__name__ = f"{watcher}: {fault}"
    return scenario


def test_a_job_survives_all_its_watchers_failing_at_once(at_once: AtOnce) -> None:
    at_once(*(surviving(fault, "*") for fault in FAULTS))


def test_a_job_survives_each_watcher_failing_alone(rallyrun: Launcher, at_once: AtOnce) -> None:
    usual = Watched(rallyrun, "exception", "none of them")
    victim = usual.pids(0)[0]
    for verb in usual.watch():
        verb.wait(120)
    os.kill(victim, signal.SIGKILL)
    usual.pids(1)
    usual.job.stop()
    names = [line.split(": ", 1) for line in usual.seen()]
    assert {"Incidents", "HangWatch", "Reports"} <= {name for _, name in names}
    at_once(
        *(
            surviving(fault, name)
            for where, name in names
            for fault in FAULTS
            if where == BESIDE or fault not in NOT_ON_LOOP
        )
    )
