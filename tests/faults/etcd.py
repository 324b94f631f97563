"""etcd on hosts of their own: one member, or a cluster of several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.etcd_cluster import binary
from tests.faults.cluster import Cluster
from tests.faults.network import Host, ip
from tests.jobs.launching import Job

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
