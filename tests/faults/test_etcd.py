"""A control plane on etcd, with hosts that lose their connection to it, or are lost altogether."""

from __future__ import annotations

import ipaddress
import os
import signal
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from tests import without_compiler
from tests.etcd_cluster import binary
from tests.faults.cluster import SOON, Agent, Cluster, gone, stays
from tests.faults.network import Host, ip
from tests.faults.test_ports import ANYBODY, store_of, uses_store
from tests.faults.test_training import FATAL, MODEL, final_loss
from tests.jobs.launching import Job
from tests.jobs.nodes import all_up, common
from tests.progress_pipe import ProgressPipe
from tests.waiting import until

CLIENTS, PEERS = 2379, 2380


def etcd_on(cluster: Cluster, hosts: Sequence[Host], folder: Path) -> list[Job]:
    """Start a member on each host, and wait until they serve."""
    peers = ",".join(f"{host.name}=http://{host.address}:{PEERS}" for host in hosts)
    members = [cluster.launcher.command([*host.entry, *_command(host, folder, peers)]) for host in hosts]
    for member in members:
        member.until_err("ready to serve client requests")
    return members


def _command(host: Host, folder: Path, peers: str) -> list[str]:
    clients, peer = f"http://{host.address}:{CLIENTS}", f"http://{host.address}:{PEERS}"
    return [
        binary(),
        f"--name={host.name}",
        f"--data-dir={folder / ('etcd-' + host.name)}",
        f"--listen-client-urls={clients}",
        f"--advertise-client-urls={clients}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster={peers}",
        "--unsafe-no-fsync",  # the tests kill processes, not machines
    ]


def endpoints(hosts: Sequence[Host]) -> str:
    """What to give an agent."""
    return ",".join(f"{host.address}:{CLIENTS}" for host in hosts)


def cut_from(host: Host, other: Host) -> None:
    """From now on nothing that `host` sends reaches `other`, and neither is told."""
    ip("-n", host.namespace, "route", "add", "blackhole", f"{other.address}/32")


def joined_to(host: Host, other: Host) -> None:
    """The cut is mended."""
    ip("-n", host.namespace, "route", "del", "blackhole", f"{other.address}/32")


LEASE = 3.0
"""Seconds; etcd's own least is two."""
EXPIRY = 3.5
"""Seconds beyond a lease: etcd's own least is two, it looks twice in one, and a node without a key has a moment."""


@pytest.fixture
def etcd(cluster: Cluster, tmp_path: Path) -> Host:
    """An etcd of one member, on a host of its own, where the agents of the job meet."""
    host = cluster.host("etcd")
    etcd_on(cluster, [host], tmp_path)
    on_etcd(cluster, [host])
    return host


def on_etcd(cluster: Cluster, hosts: list[Host]) -> None:
    cluster.backend, cluster.lease = "etcd", LEASE
    cluster.where = endpoints(hosts)


def coordinator_of(agents: list[Agent]) -> tuple[Agent, list[Agent]]:
    """The one that was elected first, and the others."""
    (coordinator,) = [agent for agent in agents if "this agent is the coordinator" in agent.job.err]
    return coordinator, [agent for agent in agents if agent is not coordinator]


def test_agents_listen_at_their_own_address_and_a_third_host_uses_no_store(cluster: Cluster, etcd: Host) -> None:
    agents = cluster.three()
    coordinator, others = coordinator_of(agents)
    for agent in agents:
        own = ipaddress.ip_address(agent.host.address).packed[::-1].hex().upper()  # as /proc/net/tcp has it
        assert {place.partition(":")[0] for place in agent.host.listening()} <= {own}
    assert coordinator.host.listening()
    coordinator.is_killed()
    cluster.all_up(others, starts=2)
    outsider = cluster.host("outsider")
    served = [uses_store(host, store_of(others[0])) for host in (*(each.host for each in others), outsider)]
    assert served == ["served", "served", "refused"]
    assert not [agent.name for agent in agents if "without a secret" in agent.job.err or ANYBODY in agent.job.err]
    cluster.finish(others)


def test_fenced_workers_of_a_coordinator_that_is_cut_off_are_gone_before_the_others_start_anew(
    cluster: Cluster, etcd: Host
) -> None:
    """It still answers its own node. What it says holds no longer than its lease in etcd."""
    agents = [cluster.start(name, "--fence") for name in "ABC"]
    cluster.all_up(agents)
    coordinator, others = coordinator_of(agents)
    with coordinator.host.unplugged():
        until(lambda: gone(coordinator.pid), "the reaper kills its worker")
        killed_at = time.monotonic()
        cluster.all_up(others, starts=2)
        assert min(agent.up_at for agent in others) > killed_at
        coordinator.job.until_err("the control plane was silent for a whole lease")
    cluster.all_up(agents, starts=2)
    cluster.finish(agents)


@pytest.mark.parametrize("leases", [0.5, 4.0])
def test_an_agent_without_etcd_goes_on_while_the_coordinator_hears_it(
    cluster: Cluster, etcd: Host, leases: float
) -> None:
    agents = cluster.three()
    _, (one, _) = coordinator_of(agents)
    cut_from(one.host, etcd)
    stays(agents, leases * LEASE)
    joined_to(one.host, etcd)
    stays(agents, 2 * LEASE)
    cluster.finish(agents)


def test_a_coordinator_without_etcd_for_less_than_its_lease_remains_it(cluster: Cluster, etcd: Host) -> None:
    cluster.lease = 10.0
    agents = cluster.three()
    coordinator, others = coordinator_of(agents)
    cut_from(coordinator.host, etcd)
    stays(agents, 2.5)
    joined_to(coordinator.host, etcd)
    stays(agents, 1.0)
    assert not [agent for agent in others if "this agent is the coordinator" in agent.job.err]
    cluster.finish(agents)


def test_a_coordinator_without_etcd_for_longer_is_succeeded_and_comes_back(cluster: Cluster, etcd: Host) -> None:
    agents = cluster.three()
    coordinator, others = coordinator_of(agents)
    cut_from(coordinator.host, etcd)
    cluster.all_up(others, starts=2)
    joined_to(coordinator.host, etcd)
    coordinator.comes_up(1, starts=2, world_size=3)
    all_up(others, starts=3, world_size=3)
    assert common(agents, [1, 1, 1], "TORCHELASTIC_RESTART_COUNT") == "0"
    cluster.finish(agents)


def test_the_coordinator_and_another_are_killed_at_once(cluster: Cluster, etcd: Host) -> None:
    cluster.nnodes = "1:3"
    agents = cluster.three()
    coordinator, (one, left) = coordinator_of(agents)
    coordinator.is_killed()
    killed = one.is_killed()
    left.comes_up(1, starts=2, world_size=1)
    assert left.up_at - killed < SOON + LEASE + EXPIRY
    cluster.finish([left])


@pytest.mark.torch
def test_training_goes_on_when_the_host_of_group_rank_0_is_lost_with_its_member(
    cluster: Cluster, tmp_path: Path, undisturbed: float
) -> None:
    """Each host has an agent and a member of etcd; the host whose agent has group rank 0 dies as a whole."""
    env = {
        **without_compiler.ENVIRONMENT,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    hosts = [cluster.host(name) for name in "ABC"]
    members = etcd_on(cluster, hosts, tmp_path)
    on_etcd(cluster, hosts)
    command = ["--max-restarts=3", *MODEL, f"--checkpoint-dir={tmp_path / 'checkpoint'}"]
    temporary = {name: tmp_path / f"tmp-{name}" for name in "ABC"}
    for folder in temporary.values():
        folder.mkdir()  # a host that is lost keeps what it had
    with closing(ProgressPipe(tmp_path / "progress")) as told:
        command.append(f"--progress={told.path}")
        agents = [cluster.run(name, command, env={**env, "TMPDIR": str(temporary[name])}) for name in "ABC"]
        told.until("step", FATAL, f"step {FATAL}")
        (first,) = [agent for agent in agents if "group_rank=0" in agent.job.err]
        for pid in first.host.pids():
            os.kill(pid, signal.SIGKILL)
        told.until("training", 20, "two workers have resumed from a checkpoint", times=2)
        told.release()
        others = [agent for agent in agents if agent is not first]
        for agent in others:
            assert agent.job.ends() == 0, agent.job.err
    found = final_loss("\n".join(line for agent in agents for line in agent.job.out))
    assert found == pytest.approx(undisturbed, abs=1e-6)

    def left() -> list[Path]:
        return [path for agent in others for path in temporary[agent.name].iterdir() if "-ended-" not in path.name]

    until(lambda: not left(), "nothing temporary is left")
    for member in members:
        member.stop()
