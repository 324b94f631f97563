"""The processors of workers: affinity and quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rallypoint.clusters.processors import Processors, processors, shortage
from tests.machines import text


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/a/b", {}, float("inf")),
        ("0::/a/b", {"a/b/cpu.max": "max 100000"}, float("inf")),
        ("0::/a/b", {"a/b/cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b", {"a/cpu.max": "100000 100000", "a/b/cpu.max": "400000 100000"}, 1.0),  # the parent group has less
        ("0::/docker/4711", {"cpu.max": "200000 100000"}, 2.0),  # a container sees its own group as root
        ("4:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"}, 0.5),
        ("4:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, float("inf")),
        ("0::/a", {"a/cpu.max": "nonsense"}, float("inf")),
    ],
)
def test_quota(tmp_path: Path, groups: str, files: dict[str, str], quota: float) -> None:
    text(tmp_path, "proc/self/cgroup", groups)
    for name, content in files.items():
        text(tmp_path, f"sys/fs/cgroup/{name}", content)
    found = processors(str(tmp_path))
    assert found == (len(os.sched_getaffinity(0)), max(os.cpu_count() or 1, found.allowed), quota)


ONE = Processors(1, 64)
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": "1" for name in ("SIZE", "RANK", "LOCAL_SIZE")}


@pytest.mark.parametrize(
    ("workers", "found", "environ", "words"),
    [
        (1, ONE, {}, None),  # intended
        (4, Processors(4, 64), {}, None),
        (4, Processors(2, 2), {}, None),  # a small machine
        (4, ONE, {}, ["4 workers share 1 processor of 64", "without taskset", "--cpuset-cpus"]),
        (4, Processors(3, 64), {}, ["share 3 processors of 64"]),
        (4, ONE, {"SLURM_JOB_ID": "7"}, ["use srun --cpus-per-task=N or --cpu-bind=none"]),
        (4, ONE, OPEN_MPI, ["use mpirun", "--bind-to none"]),
        (4, Processors(64, 64, 2.0), {}, ["share a CPU quota of 2 of 64 processors", "limits.cpu"]),
        (4, Processors(64, 64, 4.0), {}, None),
        (4, Processors(2, 64, 8.0), {}, ["share 2 processors of 64"]),
    ],
)
def test_shortage(workers: int, found: Processors, environ: dict[str, str], words: list[str] | None) -> None:
    short = shortage(workers, found, environ)
    assert (short is None) == (words is None)
    for word in words or []:
        assert word in "; ".join(short or ())
