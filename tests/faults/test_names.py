"""Endpoints whose name does not resolve yet, is a virtual address, or belongs to another machine."""

from __future__ import annotations

import sys

from tests.faults.network import Host, Network
from tests.jobs.launching import RALLYRUN, Job, Launcher

PORT = 29400
NAME = "job-1.svc"
BOUND = 'mount --bind "$0" /etc/hosts && exec "$@"'
WORKER = "import os; e = os.environ; os.write(1, f\"{e['MASTER_ADDR']} {e['RANK']}/{e['WORLD_SIZE']}\\n\".encode())"
WAITS = f"waiting for the control plane at {NAME}:{PORT}"


def knows(rallyrun: Launcher, host: Host, *lines: str) -> None:
    """From now on these are the lines of the host's file of names."""
    (rallyrun.folder / f"hosts-{host.name}").write_text(
        "".join(f"{line}\n" for line in ("127.0.0.1 localhost", *lines))
    )


def start(rallyrun: Launcher, host: Host, *flags: str, **env: str) -> Job:
    hosts = str(rallyrun.folder / f"hosts-{host.name}")
    words = ["--nnodes=2", "--rdzv-id=job", *flags, rallyrun.script(WORKER)]
    return rallyrun.command([*host.entry, "unshare", "-m", "sh", "-c", BOUND, hosts, *RALLYRUN, *words], env)


def c10d(conf: str = "lease=6") -> list[str]:
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
    job = start(rallyrun, second, *c10d("join_timeout=12"))
    assert job.ends() == 1
    told = [line for line in job.err.splitlines() if "no node recognizes job-1.svc" in line]
    assert len(told) == 2, job.err
    waiting, last = told
    for line in (waiting, last):
        assert "set is_host=true on one" in line
        assert f"{first.address}: Connection refused" in line
    assert "giving up in" in waiting
    assert last.startswith("rallyrun: error: ")


def static(*flags: str) -> list[str]:
    return ["--master-addr=n1", f"--master-port={PORT}", *flags]


def test_a_forgotten_node_rank_is_told_at_once_and_ends_where_it_is_certain(net: Network, rallyrun: Launcher) -> None:
    """Every node hosts itself then, and one of them where all look for rank 0."""
    first, second = net.hosts
    for host in net.hosts:
        knows(rallyrun, host, f"{first.address} n1")
    told = f"rank 0 must run on n1 ({first.address}); this is {second.address}"
    alone = start(rallyrun, second, *static())
    alone.until_err(told)
    assert "--node-rank" in alone.err
    assert "--master-addr" in alone.err
    right = start(rallyrun, first, *static())
    assert alone.ends() == 1
    assert f"rallyrun: error: {told}; set a different --node-rank on this node: another node" in alone.err
    late = start(rallyrun, second, *static("--node-rank=1"))
    assert [job.ends() for job in (right, late)] == [0, 0], (right.err, late.err)
    assert "must run" not in right.err + late.err


def test_a_node_of_another_rank_hears_where_rank_0_must_run(net: Network, rallyrun: Launcher) -> None:
    first, second = net.hosts
    knows(rallyrun, second, f"{first.address} n1")
    job = start(rallyrun, second, *static("--node-rank=1", "--rdzv-conf=timeout=12"))
    assert job.ends() == 1
    told = f"rank 0 must run on n1 ({first.address}); this is {second.address} with --node-rank 1; check --master-addr"
    assert job.err.count(told) == 2, job.err


def test_what_is_not_certain_ends_no_job(net: Network, rallyrun: Launcher) -> None:
    """Another job at the endpoint, and a name that stands for nothing: both are told, and the others waited for."""
    first, second = net.hosts
    knows(rallyrun, first, f"{first.address} n1")
    knows(rallyrun, second, f"{first.address} n1")
    other = start(rallyrun, first, *static("--rdzv-id=other"), LOGLEVEL="INFO")
    other.until_err("waiting for the rendezvous of job 'other'")
    job = start(rallyrun, second, *static("--rdzv-conf=timeout=8"))
    job.until_err("belongs to job 'other'")
    job.until_err(f"rank 0 must run on n1 ({first.address}); this is {second.address}")
    other.stop()
    assert job.ends() == 1  # before the next one begins, which would be certain of it
    knows(rallyrun, first)
    nameless = start(rallyrun, first, *static("--rdzv-conf=timeout=8"))
    nameless.until_err("--master-addr is set to 'n1', which does not resolve here")
    assert nameless.ends() == 1
    for each in (job, nameless):
        assert "started with the same --master-addr, --nnodes and --rdzv-id" in each.err.splitlines()[-1]


BALANCER = """
import asyncio, sys
async def hand_on(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
    finally:
        writer.close()
async def serve(reader, writer):
    try:
        back = await asyncio.open_connection(sys.argv[1], int(sys.argv[2]))
    except OSError:
        return writer.close()
    await asyncio.gather(hand_on(reader, back[1]), hand_on(back[0], writer))
async def main():
    async with await asyncio.start_server(serve, None, int(sys.argv[2])) as server:
        print("serves", flush=True)
        await server.serve_forever()
asyncio.run(main())
"""


def test_an_address_that_only_leads_to_rank_0_is_as_good_as_its_own(net: Network, rallyrun: Launcher) -> None:
    """As a virtual address of Kubernetes does, or NAT: a host in between hands every connection on."""
    first, second, between = *net.hosts, net.add("between")
    for host in net.hosts:
        knows(rallyrun, host, f"{between.address} n1")
    script = rallyrun.script(BALANCER, "balancer.py")
    balancer = rallyrun.command([*between.entry, sys.executable, script, first.address, str(PORT)])
    balancer.until(lambda lines: lines == ["serves"], "it listens")
    zero = start(rallyrun, first, *static("--node-rank=0"), LOGLEVEL="INFO")
    zero.until_err("is an address of this machine")
    one = start(rallyrun, second, *static("--node-rank=1"))
    assert [job.ends() for job in (zero, one)] == [0, 0], (zero.err, one.err)
    assert sorted(line.split()[0] for job in (zero, one) for line in job.out) == ["n1", "n1"]
    assert "must run" not in zero.err + one.err
    balancer.stop()
