"""Real torch workers under our launcher: they meet, reduce, and meet again after one of them was killed."""

from __future__ import annotations

import os
import signal

import pytest

from tests.jobs.launching import Job, Launcher
from tests.ports import free_port

pytestmark = pytest.mark.torch

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


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_two_and_one_workers_meet_and_meet_again_when_one_is_killed(launcher: Launcher, backend: str) -> None:
    place = [f"--rdzv-backend={backend}", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=job", "--nnodes=2"]
    script = launcher.script(REDUCES_UNTIL_TOLD)
    a = launcher(*place, "--max-restarts=1", "--nproc-per-node=2", "--node-rank=0", script)
    b = launcher(*place, "--max-restarts=1", "--node-rank=1", script)
    for job, workers in ((a, 2), (b, 1)):
        wait_for(job, workers)
    os.kill(ups(b)[0][3], signal.SIGKILL)
    for job, workers in ((a, 2), (b, 1)):
        wait_for(job, 2 * workers)
    (launcher.folder / "finish").touch()
    for job in (a, b):
        assert job.ends() == 0, job.err
    assert sorted(up[:3] for up in ups(a) + ups(b)) == [(rank, count, 3) for rank in range(3) for count in range(2)]
    for job in (a, b):
        assert "SIGKILL" in job.err
