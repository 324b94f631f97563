"""Real torch workers under our launcher: they meet, reduce, and meet again after one of them was killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.jobs.launching import Job, Launcher
from tests.ports import free_port

pytestmark = pytest.mark.torch

ALLREDUCE = str(Path(__file__).parents[2] / "examples" / "allreduce.py")

REDUCES_UNTIL_TOLD = """
import os, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
first = True
while True:
    told = torch.tensor([1, os.path.exists("finish")])
    dist.all_reduce(told)
    size, how_many = told.tolist()
    assert size == dist.get_world_size(), size
    if first:
        os.write(1, f"up {dist.get_rank()} {count} {size} {os.getpid()}\\n".encode())
        first = False
    if how_many:
        break
    time.sleep(0.02)
dist.destroy_process_group()
"""


def ups(job: Job) -> list[tuple[int, int, int, int]]:
    """Rank, restart count, world size and pid of each worker that has taken part in a reduction."""
    found = [line.split() for line in job.out if line.startswith("up ")]
    return [(int(rank), int(count), int(size), int(pid)) for _, rank, count, size, pid in found]


def wait_for(job: Job, number: int) -> None:
    job.until(lambda lines: sum(line.startswith("up ") for line in lines) >= number, f"{number} workers have reduced")


def test_standalone(launcher: Launcher) -> None:
    job = launcher("--standalone", "--nproc-per-node=2", ALLREDUCE)
    assert job.ends() == 0, job.err
    assert sorted(job.out) == ["rank 0 of 2: sum 3", "rank 1 of 2: sum 3"]


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_two_nodes_with_two_and_one_workers(launcher: Launcher, backend: str) -> None:
    place = [f"--rdzv-backend={backend}", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=job", "--nnodes=2"]
    jobs = [
        launcher(*place, "--nproc-per-node=2", "--node-rank=0", ALLREDUCE),
        launcher(*place, "--node-rank=1", ALLREDUCE),
    ]
    for job in jobs:
        assert job.ends() == 0, job.err
    assert [len(job.out) for job in jobs] == [2, 1]
    assert sorted(jobs[0].out + jobs[1].out) == [f"rank {rank} of 3: sum 6" for rank in range(3)]


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_a_killed_worker_and_its_peers_meet_again(launcher: Launcher, backend: str) -> None:
    place = [f"--rdzv-backend={backend}", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=job", "--nnodes=2"]
    script = launcher.script(REDUCES_UNTIL_TOLD)
    a = launcher(*place, "--max-restarts=1", "--node-rank=0", script)
    b = launcher(*place, "--max-restarts=1", "--node-rank=1", script)
    for job in (a, b):
        wait_for(job, 1)
    os.kill(ups(b)[0][3], signal.SIGKILL)
    for job in (a, b):
        wait_for(job, 2)
    (launcher.folder / "finish").touch()
    for job in (a, b):
        assert job.ends() == 0, job.err
    assert sorted(up[:3] for up in ups(a) + ups(b)) == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
    for job in (a, b):
        assert "SIGKILL" in job.err
