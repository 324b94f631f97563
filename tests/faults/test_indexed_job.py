"""Pods of an Indexed Job of Kubernetes, as far as one machine can imitate them.

They have the environment, host names and hosts files that kubelets provide, and a DNS in which a pod appears late.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.network import Host, Network, network
from tests.jobs.launching import RALLYRUN, Job, Launcher

DOMAIN = "workers.research.svc.cluster.local"
WORKER = (
    "import os; e = os.environ; os.write(1, f\"{e['RANK']} of {e['WORLD_SIZE']} at {e['MASTER_ADDR']}\\n\".encode())"
)
AS_POD = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'


@pytest.fixture
def net(hosts_possible: None) -> Iterator[Network]:
    with network("train-0", "train-1", "train-2") as made:
        yield made


def hosts_file(rallyrun: Launcher, pod: Host) -> Path:
    return rallyrun.folder / f"hosts-{pod.name}"


def start(rallyrun: Launcher, pod: Host, *flags: str, env: dict[str, str] | None = None, service: bool = True) -> Job:
    """Start a pod, which knows its own name alone; with a headless service that is the whole name."""
    own = f"{pod.name}.{DOMAIN} {pod.name}" if service else pod.name
    hosts_file(rallyrun, pod).write_text(
        f"# Kubernetes-managed hosts file.\n127.0.0.1 localhost\n{pod.address} {own}\n"
    )
    words = ["unshare", "--mount", "--uts", "sh", "-c", AS_POD, pod.name, str(hosts_file(rallyrun, pod)), *RALLYRUN]
    given = {"JOB_COMPLETION_INDEX": pod.name[-1], "JOB_COMPLETIONS": "3", **(env or {})}
    return rallyrun.command([*pod.entry, *words, *flags, rallyrun.script(WORKER)], given)


def test_pods_meet_at_pod_0_when_dns_knows_it(net: Network, rallyrun: Launcher) -> None:
    pods = net.hosts
    others = [start(rallyrun, pod, "--cluster=auto", "--nproc-per-node=1") for pod in pods[1:]]
    for job in others:
        job.until_err(f"waiting for the control plane at train-0.{DOMAIN}:29400")
    first = start(rallyrun, pods[0], "--cluster=auto", "--nproc-per-node=1")
    for pod in pods[1:]:
        with hosts_file(rallyrun, pod).open("a") as file:  # in place, since it is mounted
            file.write(f"{pods[0].address} train-0.{DOMAIN}\n")
    jobs = [first, *others]
    assert [job.ends() for job in jobs] == [0, 0, 0], [job.err for job in jobs]
    assert [job.out for job in jobs] == [[f"{rank} of 3 at {pods[0].address}"] for rank in range(3)]
