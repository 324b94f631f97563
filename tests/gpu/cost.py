"""The launcher's cost while a GPU trains: how often its processes run, and whether they slow down steps."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.children import descendants
from benchmarks.system import ProcessClock

from tests.gpu.jobs import RALLYRUN, Job, program, running
from tests.gpu.rows import Bench, Check, Needs, Unexpected

_GROUP = "cost"
_LOOK = 5.0
"""Seconds of one look."""
_MOST_WAKE_UPS = 4
"""In one look. A wake-up takes a processor for some microseconds, from one training thread at most."""


def _switches(pids: Iterable[int], kind: str) -> int:
    """Context switches so far of all threads of these processes: `voluntary` or `nonvoluntary`."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(OSError):
                    for line in (thread / "status").read_text().splitlines():
                        if line.startswith(f"{kind}_ctxt_switches"):
                            total += int(line.split()[1])
    return total


def _launchers(job: Job) -> list[int]:
    """The agent, and what it keeps beside the workers."""
    workers = set(job.pids.values())
    below = {pid for worker in workers for pid in descendants(worker)}
    return [job.agent.pid, *(pid for pid in descendants(job.agent.pid) if pid not in workers | below)]


def _steps(job: Job, seconds: float) -> list[float]:
    """Seconds of each step that is told within a time."""
    times = []
    until = time.monotonic() + seconds
    while (at := job.event("step", 30.0)[0]) < until:
        times.append(at)
    return [later - earlier for earlier, later in pairwise(times)]


def _cost(bench: Bench) -> str:
    folder = bench.new_folder("cost")
    log = folder / "log"
    command = [*RALLYRUN, "--standalone", "--nproc-per-node=1", f"--log-dir={log}", program("training")]
    command += [f"--device={bench.device}", f"--backend={bench.backend}", f"--checkpoint-dir={folder}"]
    with running(command) as job:
        job.step(20)
        ours, workers = _launchers(job), list(job.pids.values())
        wake_ups, preempted = _switches(ours, "voluntary"), _switches(workers, "nonvoluntary")
        used = sum(ProcessClock(pid).seconds() for pid in ours)
        with_us = _steps(job, _LOOK)
        wake_ups = _switches(ours, "voluntary") - wake_ups
        preempted = _switches(workers, "nonvoluntary") - preempted
        used = sum(ProcessClock(pid).seconds() for pid in ours) - used
        for pid in ours:
            os.kill(pid, signal.SIGSTOP)
        try:
            without = _switches(workers, "nonvoluntary")
            alone = _steps(job, _LOOK)
            without = _switches(workers, "nonvoluntary") - without
        finally:
            for pid in ours:
                os.kill(pid, signal.SIGCONT)
    told = (
        f"{wake_ups} wake-ups of ours and {used * 1000:.1f} ms of processor time in {_LOOK:.0f} s; training threads "
        f"lost a processor {preempted} times, {without} times while ours were stopped; a step took "
        f"{median(with_us) * 1000:.2f} ms, {median(alone) * 1000:.2f} ms while ours were stopped"
    )
    if wake_ups > _MOST_WAKE_UPS:
        raise Unexpected(told)
    return told


CHECKS = (
    Check(
        _GROUP,
        "the launcher while a GPU trains",
        f"at most {_MOST_WAKE_UPS} wake-ups in {_LOOK:.0f} s, so it interrupts no training thread",
        _cost,
        Needs(rehearsal=True),
    ),
)
