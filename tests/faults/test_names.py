"""Endpoints whose name stands for nothing yet, for a virtual address, or for somebody else's machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.network import Host, Network, network, why_not
from tests.jobs.launching import RALLYRUN, Job, Launcher, launching

PORT = 29400
NAME = "job-1.svc"
BOUND = 'mount --bind "$0" /etc/hosts && exec "$@"'
WORKER = "import os; e = os.environ; os.write(1, f\"{e['MASTER_ADDR']} {e['RANK']}/{e['WORLD_SIZE']}\\n\".encode())"
WAITS = f"waiting for the control plane at {NAME}:{PORT}"


@pytest.fixture
def net() -> Iterator[Network]:
    if reason := why_not():
        pytest.skip(reason)
    with network("n1", "n2") as made:
        yield made


@pytest.fixture
def rallyrun(tmp_path: Path, net: Network) -> Iterator[Launcher]:
    with launching(tmp_path) as made:
        yield made


def knows(rallyrun: Launcher, host: Host, *lines: str) -> None:
    """From now on these are the lines of the host's file of names."""
    (rallyrun.folder / f"hosts-{host.name}").write_text(
        "".join(f"{line}\n" for line in ("127.0.0.1 localhost", *lines))
    )


def start(rallyrun: Launcher, host: Host, *flags: str, **env: str) -> Job:
    hosts = str(rallyrun.folder / f"hosts-{host.name}")
    words = ["--nnodes=2", "--rdzv-id=job", *flags, rallyrun.script(WORKER)]
    return rallyrun.command([*host.entry, "unshare", "-m", "sh", "-c", BOUND, hosts, *RALLYRUN, *words], env)


def c10d(conf: str = "lease=1") -> list[str]:
    return ["--rdzv-backend=c10d", f"--rdzv-endpoint={NAME}:{PORT}", f"--rdzv-conf={conf}"]


def test_a_name_that_is_known_late_makes_its_machine_the_host(net: Network, rallyrun: Launcher) -> None:
    """The normal start on Kubernetes: a pod's name is there when the pod is."""
    jobs = []
    for host in net.hosts:
        knows(rallyrun, host)
        jobs.append(start(rallyrun, host, *c10d()))
    for job in jobs:
        job.until_err(WAITS)
    for host in reversed(net.hosts):
        knows(rallyrun, host, f"{net.hosts[0].address} {NAME}")
    assert [job.ends() for job in jobs] == [0, 0], [job.err for job in jobs]
    assert sorted(line.split()[1] for job in jobs for line in job.out) == ["0/2", "1/2"]


def test_a_name_that_moves_to_another_machine_takes_the_host_with_it(net: Network, rallyrun: Launcher) -> None:
    first, second = net.hosts
    for host in net.hosts:
        knows(rallyrun, host, f"10.77.0.99 {NAME}")
    job = start(rallyrun, second, *c10d())
    job.until_err(WAITS)
    knows(rallyrun, second, f"{second.address} {NAME}")
    knows(rallyrun, first, f"{second.address} {NAME}")
    other = start(rallyrun, first, *c10d())
    assert [each.ends() for each in (job, other)] == [0, 0], [job.err, other.err]


def test_behind_a_virtual_address_it_is_said_that_nobody_hosts(net: Network, rallyrun: Launcher) -> None:
    """In the line that says what is waited for, and at the end."""
    first, second = net.hosts
    knows(rallyrun, second, f"{first.address} {NAME}")  # where nobody listens, as behind a service without a back end
    job = start(rallyrun, second, *c10d("join_timeout=5"))
    assert job.ends() == 1
    told = [line for line in job.err.splitlines() if "no node takes itself for job-1.svc" in line]
    assert len(told) == 2, job.err
    waiting, last = told
    for line in (waiting, last):
        assert "set is_host=true on one" in line
        assert f"{first.address}: Connection refused" in line.replace("[Errno 111] ", "")
    assert "giving up in" in waiting
    assert last.startswith("rallyrun: error: ")
