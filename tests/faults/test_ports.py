"""Who can reach a job's ports: its nodes, and no third host that is none of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rallypoint.base.secrets import new_secret
from tests.faults.cluster import PORT, Cluster
from tests.faults.network import Host, ip

ANSWERS = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5).close()
except ConnectionRefusedError:
    print("refused")
else:
    print("connected")
"""

WITHOUT = "without a secret, so that whoever reaches it can join"


def knock(host: Host, address: str, port: int) -> str:
    """Whether a connection from a host is taken at this address."""
    command = [*host.entry, sys.executable, "-c", ANSWERS, address, str(port)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()


def second_address(host: Host, number: int) -> str:
    """An address more on the same cable, in another network."""
    address = f"10.88.0.{number}"
    ip("-n", host.namespace, "address", "add", f"{address}/24", "dev", "eth0")
    return address


@pytest.mark.parametrize("secret", [False, True])
def test_the_control_plane_listens_at_the_endpoint_s_address_alone(cluster: Cluster, secret: bool) -> None:
    env = {"RALLYPOINT_SECRET": new_secret()} if secret else {}
    first, stranger = cluster.host("A"), cluster.host("stranger")
    other = second_address(first, 1)
    second_address(stranger, 9)
    cluster.nnodes = "2"
    agents = [cluster.start(name, env=env) for name in "AB"]
    cluster.all_up(agents)
    assert knock(stranger, first.address, PORT) == "connected"
    assert knock(stranger, other, PORT) == "refused"
    assert [agent.job.err.count(WITHOUT) for agent in agents] == [0 if secret else 1, 0]
    cluster.finish(agents)


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_a_job_of_one_host_cannot_be_reached_from_others(cluster: Cluster, backend: str) -> None:
    first, stranger = cluster.host("A"), cluster.host("stranger")
    cluster.where, cluster.backend, cluster.nnodes = f"127.0.0.1:{PORT}", backend, "2"
    agents = [cluster.start("A", "--node-rank=0")]
    agents[0].job.until_err(f"at 127.0.0.1:{PORT} (which other machines cannot reach): 1 of 2 nodes are in")
    agents.append(cluster.start("B", "--node-rank=1", on="A"))
    cluster.all_up(agents)
    places = first.listening()
    assert places
    assert {place.partition(":")[0] for place in places} == {"0100007F"}, "127.0.0.1, in the machine's byte order"
    assert knock(stranger, first.address, PORT) == "refused"
    assert "without a secret" not in agents[0].job.err
    cluster.finish(agents)


@pytest.mark.parametrize("flags", [[f"--rdzv-endpoint=localhost:{PORT}"], [f"--master-port={PORT}"], []])
def test_where_the_first_node_says_only_that_it_is_itself_others_reach_it(cluster: Cluster, flags: list[str]) -> None:
    """As on Kubeflow, whose first pod is told to meet at localhost; and where --master-addr is left to its default."""
    first = cluster.host("A")
    port = PORT if flags else 29500
    backend = "c10d" if flags and "localhost" in flags[0] else "static"
    agents = []
    for rank, where in enumerate((flags, [f"--rdzv-endpoint={first.address}:{port}"])):
        command = [f"--rdzv-backend={backend}", "--nnodes=2", f"--node-rank={rank}", "--rdzv-id=job", *where]
        agents.append(cluster.alone("AB"[rank], command))
    cluster.all_up(agents)
    assert f"the control plane listens at *:{port} {WITHOUT}" in agents[0].job.err
    cluster.finish(agents)


@pytest.mark.parametrize(
    ("conf", "answer"), [("listen=any", "connected"), ("listen=10.88.0.1", "connected"), ("", "refused")]
)
def test_where_it_listens_can_be_chosen(cluster: Cluster, conf: str, answer: str) -> None:
    first, stranger = cluster.host("A"), cluster.host("stranger")
    other = second_address(first, 1)
    second_address(stranger, 9)
    cluster.nnodes, cluster.conf = "1:2", f"last_call_timeout=1{conf and ','}{conf}"
    agent = cluster.start("A")
    cluster.all_up([agent])
    assert knock(stranger, other, PORT) == answer
    assert knock(stranger, first.address, PORT) == ("refused" if conf.endswith("10.88.0.1") else "connected")
    cluster.finish([agent])


def test_what_is_no_address_of_this_machine_is_refused(cluster: Cluster) -> None:
    cluster.host("A")
    cluster.conf = "listen=10.88.0.1"
    agent = cluster.start("A")
    assert agent.job.ends() in {1, 2}
    assert "rendezvous option listen='10.88.0.1' is no address of this machine" in agent.job.err


def test_the_address_that_a_node_is_given_is_listened_at_too(cluster: Cluster) -> None:
    first, stranger = cluster.host("A"), cluster.host("stranger")
    other = second_address(first, 1)
    second_address(stranger, 9)
    cluster.nnodes, cluster.conf = "1:2", "last_call_timeout=1"
    agent = cluster.start("A", f"--local-addr={other}")
    cluster.all_up([agent])
    assert knock(stranger, other, PORT) == knock(stranger, first.address, PORT) == "connected"
    cluster.finish([agent])
