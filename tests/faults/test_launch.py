"""`rallyctl launch` over a real ssh, to hosts of their own."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.ssh_hosts import SshHosts, ssh_hosts, why_not
from tests.jobs.launching import Job, Launcher, launching

ALL = "--hosts=n1,n2,n3"

WORKER = """
import os, sys, time
e = os.environ
os.write(1, f"rank {e['RANK']} of {e['WORLD_SIZE']} on {os.uname().nodename}: up\\n".encode())
while not os.path.exists("finish"):
    time.sleep(0.02)
    if os.path.exists(f"fail-{e['RANK']}"):
        sys.exit(5)
"""


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    if (reason := why_not()) is not None:
        pytest.skip(f"SSH TESTS DID NOT RUN: {reason}")
    with ssh_hosts(tmp_path_factory.mktemp("ssh"), "n1", "n2", "n3") as made:
        yield made


@pytest.fixture
def hosts(machines: SshHosts, tmp_path: Path) -> Iterator[tuple[SshHosts, Launcher]]:
    with launching(tmp_path) as launcher:
        launcher.script(WORKER, "worker.py")
        yield machines, launcher
    machines.until_empty()


Fixture = tuple[SshHosts, Launcher]


def up(job: Job, world: int) -> None:
    """Wait until all workers of a world are up, each rank once."""
    job.until(
        lambda lines: all(any(f": rank {rank} of {world} on" in line for line in lines) for rank in range(world)),
        f"{world} workers are up",
    )


def test_a_job_of_three_hosts(hosts: Fixture) -> None:
    """Nothing is said of how the nodes meet; ranks go by the order of the hosts, and slots are workers."""
    ssh, launcher = hosts
    job = ssh.launch(launcher, "--hosts=n1:1,n2:2,n3:1", "--", "rallyrun", "worker.py")
    up(job, 4)
    (launcher.folder / "finish").touch()
    assert job.ends() == 0, job.err
    assert sorted(line for line in job.out if line.endswith("up")) == [
        "n1: rank 0 of 4 on n1: up",
        "n2: rank 1 of 4 on n2: up",
        "n2: rank 2 of 4 on n2: up",
        "n3: rank 3 of 4 on n3: up",
    ]
    assert job.err == ""


def test_a_job_survives_a_host(hosts: Fixture) -> None:
    """All that runs on a host is killed, sshd's part of it too: the job goes on without it, and decides how it ends."""
    ssh, launcher = hosts
    job = ssh.launch(launcher, ALL, "--", "rallyrun", "--nnodes=2:3", "worker.py")
    up(job, 3)
    for pid in ssh.hosts["n2"].pids():
        if pid != ssh.server("n2"):
            os.kill(pid, signal.SIGKILL)
    up(job, 2)
    (launcher.folder / "finish").touch()
    assert job.ends() == 0, job.err
    assert "n2: the connection is lost" in job.err
    assert "2 hosts go on" in job.err
    assert "the job has succeeded without n2" in job.err
    shutil.rmtree(launcher.folder / "tmp")  # a lost machine's temporary files are left on it
    (launcher.folder / "tmp").mkdir()
