"""Counts the processors available to this process and its workers, and detects a shortage."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from rallypoint.base.light_typing import NamedTuple
from rallypoint.base.procfs import read_text
from rallypoint.failures.failure import own_cgroup_path


class Processors(NamedTuple):
    """How many processors are in this process's affinity, in the machine, and in its control groups' quota.

    `quota` is infinite without a limit; 1.5 means the time of one and a half processors.
    """

    allowed: int
    there: int
    quota: float = float("inf")


def processors(root: str = "/") -> Processors:
    """Count the processors. `root` is the folder with `sys` and `proc`."""
    allowed = len(os.sched_getaffinity(0))
    return Processors(allowed, max(os.cpu_count() or 1, allowed), min(_quotas(root), default=float("inf")))


def _quotas(root: str) -> Iterator[float]:
    """The quotas of this control group and its parents."""
    folder, second = own_cgroup_path("cpu", os.path.join(root, "proc"))
    top = os.path.join(root, "sys/fs/cgroup" if second else "sys/fs/cgroup/cpu")
    path = top + folder.rstrip("/")
    if not os.path.isdir(path):  # a container sees its own group at the top, but under its outside name
        path = top
    while path.startswith(top):
        if second:
            time, _, period = read_text(f"{path}/cpu.max").partition(" ")
        else:
            time, period = read_text(f"{path}/cpu.cfs_quota_us"), read_text(f"{path}/cpu.cfs_period_us")
        if time.strip().isdigit() and period.strip().isdigit() and int(period):  # without a quota: `max`, or -1
            yield int(time) / int(period)
        path = os.path.dirname(path)


def shortage(workers: int, found: Processors, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """What the workers lack, and the remedy; None if each can have a processor or nothing limits them.

    A machine with fewer processors than workers is no limit: the user knows the machine.
    """
    if workers < 2 or workers <= min(found.allowed, found.quota):
        return None
    if found.quota < found.allowed and found.quota < found.there:
        fact = f"{workers} workers share a CPU quota of {found.quota:.3g} of {found.there} processors (cgroup)"
        remedy = "raise the quota (limits.cpu for a pod, --cpus for a container, CPUQuota= for a service)"
        return fact, f"{remedy}; or start fewer workers"
    if found.allowed < found.there:
        fact = (
            f"{workers} workers share {_count(found.allowed)} of {found.there} because of this process's CPU affinity"
        )
        return fact, f"{_remedy(environ)}; or start fewer workers"
    return None


def _count(number: int) -> str:
    return f"{number} processor{'' if number == 1 else 's'}"


def _remedy(environ: Mapping[str, str]) -> str:
    if "SLURM_JOB_ID" in environ:
        return "use srun --cpus-per-task=N or --cpu-bind=none"
    from rallypoint.clusters.mpi import launcher_of

    if launcher := launcher_of(environ):
        return f"use {launcher.one_per_host} rallyrun ..."
    return "start it without taskset or numactl, or allow the container more processors (--cpuset-cpus)"
