"""`--socket-ifname` on hosts with two interfaces, one of which leads nowhere: real gloo, over IPv4 and IPv6 alone."""

from __future__ import annotations

import json

import pytest

from tests.faults.network import Host, Network, ip
from tests.jobs.launching import RALLYRUN, Job, Launcher

pytestmark = pytest.mark.torch

PORT = 29400

WORKER = """
import json, os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
names = {name: os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
os.write(1, json.dumps({**names, "sum": total.item()}).encode() + b"\\n")
dist.destroy_process_group()
"""


@pytest.fixture
def net(net: Network) -> Network:
    for number, host in enumerate(net.hosts, 1):
        # Looked at first by whoever goes by order, and by name: it leads to nobody.
        ip("-n", host.namespace, "link", "add", "aaa0", "type", "bridge")
        ip("-n", host.namespace, "address", "add", f"10.88.0.{number}/24", "dev", "aaa0")
        ip("-n", host.namespace, "link", "set", "aaa0", "up")
    return net


def start(rallyrun: Launcher, host: Host, endpoint: str, *flags: str, **env: str) -> Job:
    flags = ("--nnodes=2", "--rdzv-id=job", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}:{PORT}", *flags)
    return rallyrun.command([*host.entry, *RALLYRUN, *flags, rallyrun.script(WORKER)], {"OMP_NUM_THREADS": "1", **env})


def found(job: Job) -> dict[str, object]:
    assert job.ends() == 0, job.err
    (line,) = [line for line in job.out if line.startswith("{")]  # gloo writes there too
    return dict(json.loads(line))


def test_the_interface_towards_the_other_nodes(net: Network, rallyrun: Launcher) -> None:
    """On the endpoint's own host too, where the way to it is the loopback; what the user has set stands."""
    first, second = net.hosts
    jobs = [
        start(rallyrun, first, first.address, "--socket-ifname=auto"),
        start(rallyrun, second, first.address, "--socket-ifname=auto", NCCL_SOCKET_IFNAME="eth"),
    ]
    for job, nccl in zip(jobs, ("=eth0", "eth"), strict=True):
        assert found(job) == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": nccl, "sum": 2.0}
    for number, job in enumerate(jobs, 1):
        told = (
            f"--socket-ifname=auto: eth0 (10.77.0.{number}) leads to the other nodes; aaa0 (10.88.0.{number}) is up "
            "too; set --socket-ifname=NAME to use another interface"
        )
        assert job.err.count(told) == 1, job.err


def test_over_ipv6_alone_and_by_name(net: Network, rallyrun: Launcher) -> None:
    for number, host in enumerate(net.hosts, 1):
        ip("-n", host.namespace, "address", "flush", "dev", "eth0")
        ip("-n", host.namespace, "address", "add", f"fd77::{number}/64", "dev", "eth0", "nodad")
    jobs = [
        start(rallyrun, host, "[fd77::1]", f"--socket-ifname={asked}")
        for host, asked in zip(net.hosts, ("auto", "eth0"), strict=True)
    ]
    for job in jobs:
        assert found(job) == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0", "sum": 2.0}
