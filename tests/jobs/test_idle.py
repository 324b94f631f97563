"""An agent whose workers run sleeps: only heartbeats wake it.

A wake-up is a voluntary context switch of any of its threads, or of a process that it keeps beside its workers: the
kernel counts them. The last work of a start may fall into the first look, so the quietest of a few looks counts.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tests.jobs.launching import Job, Launcher
from tests.ports import free_port

LOOKS, SECONDS = 6, 4.0
"""How many looks at most, and how long each of them is."""
LEASE = 6.0
"""Longer than a busy machine leaves an agent without processor time: one that is lost starts its worker again."""
HEARTBEATS = 3
"""In a lease. Each is sent and answered: two wake-ups of who sends it, one of who answers."""
CHECKS = 4
"""How often in a lease the host of the control plane checks who is silent."""
WORKER = "import os, signal\nos.write(1, b'up\\n')\nsignal.pause()\n"


def wake_ups(pid: int) -> int:
    """So far, of all threads of an agent and of the processes below it."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended
            (line,) = [one for one in (thread / "status").read_text().splitlines() if one.startswith("voluntary")]
            total += int(line.split()[1])
            total += sum(wake_ups(int(child)) for child in (thread / "children").read_text().split())
    return total


def looks(jobs: list[Job]) -> Iterator[list[int]]:
    """Wake-ups of each agent in one look after another, all at the same time."""
    for _ in range(LOOKS):
        before = [wake_ups(job.pid) for job in jobs]
        threading.Event().wait(SECONDS)
        yield [wake_ups(job.pid) - count for job, count in zip(jobs, before, strict=True)]


def up(job: Job) -> None:
    job.until(lambda lines: "up" in lines, "the worker is up")


def test_an_agent_alone_is_never_woken_and_agents_of_two_by_heartbeats_alone(rallyrun: Launcher) -> None:
    endpoint, script = f"127.0.0.1:{free_port()}", rallyrun.script(WORKER)
    alone = rallyrun("--standalone", "--nproc-per-node=2", script)
    shared = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
    conf = f"--rdzv-conf=lease={LEASE},is_host="
    jobs = [alone, *(rallyrun(*shared, "--rdzv-id=idle", conf + hosts, script) for hosts in ("true", "false"))]
    for job in jobs:
        up(job)
    leases = SECONDS / LEASE
    # Without heartbeats, nothing else would have been seen either: an agent without processor time is not quiet.
    least = [0, 1, 1]
    most = [0, math.ceil(leases * (HEARTBEATS + CHECKS)) + 1, math.ceil(leases * 2 * HEARTBEATS) + 2]
    found, quiet = [], [False] * len(jobs)
    for counts in looks(jobs):
        found.append(counts)
        bounds = zip(least, counts, most, strict=True)
        quiet = [before or low <= count <= high for before, (low, count, high) in zip(quiet, bounds, strict=True)]
        if all(quiet):
            return
    raise AssertionError(f"wake-ups in {SECONDS:g} s each of one alone, host and guest: {found}; explained are {most}")
