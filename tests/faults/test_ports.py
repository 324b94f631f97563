"""Who can reach a job's ports: its nodes, and no third host."""

from __future__ import annotations

import sys

import pytest

from rallypoint.base.secrets import new_secret
from tests import typed_requests as wire
from tests.faults.cluster import PORT, Agent, Cluster
from tests.faults.network import Host, ip
from tests.faults.test_names import BALANCER, BOUND
from tests.jobs.nodes import all_up
from tests.processes import completed

ANSWERS = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60).close()
except ConnectionRefusedError:
    print("refused")
else:
    print("connected")
"""

WITHOUT = "without a secret, so anyone who can reach it can join"


def knock(host: Host, address: str, port: int) -> str:
    """Whether a connection from a host is taken at this address."""
    command = [*host.entry, sys.executable, "-c", ANSWERS, address, str(port)]
    return completed(command, timeout=150, check=True).stdout.strip()


def second_address(host: Host, number: int) -> str:
    """An address more on the same cable, in another network."""
    address = f"10.88.0.{number}"
    ip("-n", host.namespace, "address", "add", f"{address}/24", "dev", "eth0")
    return address


@pytest.mark.parametrize("secret", [False, True])
def test_the_control_plane_listens_at_the_endpoint_s_address_alone(cluster: Cluster, secret: bool) -> None:
    env = {"RALLYPOINT_SECRET": new_secret()} if secret else {}
    first, outsider = cluster.host("A"), cluster.host("outsider")
    other = second_address(first, 1)
    second_address(outsider, 9)
    cluster.nnodes = "2"
    agents = [cluster.start(name, env=env) for name in "AB"]
    cluster.all_up(agents)
    assert knock(outsider, first.address, PORT) == "connected"
    assert knock(outsider, other, PORT) == "refused"
    assert [agent.job.err.count(WITHOUT) for agent in agents] == [0 if secret else 1, 0]
    cluster.finish(agents)


@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_a_job_of_one_host_cannot_be_reached_from_others(cluster: Cluster, backend: str) -> None:
    first, outsider = cluster.host("A"), cluster.host("outsider")
    cluster.where, cluster.backend, cluster.nnodes = f"127.0.0.1:{PORT}", backend, "2"
    agents = [cluster.start("A", "--node-rank=0")]
    agents[0].job.until_err(f"at 127.0.0.1:{PORT} (which other machines cannot reach): 1 of 2 nodes have joined")
    agents.append(cluster.start("B", "--node-rank=1", on="A"))
    cluster.all_up(agents)
    places = first.listening()
    assert places
    assert {place.partition(":")[0] for place in places} == {"0100007F"}, "127.0.0.1, in the machine's byte order"
    assert knock(outsider, first.address, PORT) == "refused"
    assert "without a secret" not in agents[0].job.err
    cluster.finish(agents)


@pytest.mark.parametrize("flags", [[f"--rdzv-endpoint=localhost:{PORT}"], []])
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
    first, outsider = cluster.host("A"), cluster.host("outsider")
    other = second_address(first, 1)
    second_address(outsider, 9)
    cluster.nnodes, cluster.conf = "1:2", f"last_call_timeout=1{conf and ','}{conf}"
    agent = cluster.start("A")
    cluster.all_up([agent])
    assert knock(outsider, other, PORT) == answer
    assert knock(outsider, first.address, PORT) == ("refused" if conf.endswith("10.88.0.1") else "connected")
    cluster.finish([agent])


def test_what_is_no_address_of_this_machine_is_refused(cluster: Cluster) -> None:
    cluster.host("A")
    cluster.conf = "listen=10.88.0.1"
    agent = cluster.start("A")
    assert agent.job.ends() in {1, 2}
    assert "rendezvous option listen='10.88.0.1' is not an address of this machine" in agent.job.err


STORE = """
import socket, sys
from datetime import timedelta
from rallypoint.store.client import TCPStore
address = sys.argv[1], int(sys.argv[2])
try:
    with socket.create_connection(address, timeout=60) as probe:
        probe.sendall(bytes.fromhex(sys.argv[3]))
        answered = probe.recv(1) != b""
except ConnectionError:
    answered = False
if answered:
    TCPStore(*address, timeout=timedelta(seconds=60)).set("of an outsider", "x")
print("served" if answered else "refused")
"""
"""A slow store is no refusal; by our client alone, which tries again until its timeout, they cannot be told apart."""
PROBE = (wire.encode(wire.Validate()) + wire.encode(wire.Ping(7))).hex()

ANYBODY = "the worker store accepts connections from any address, because "


def store_of(agent: Agent) -> tuple[str, int]:
    """Where the store of the round is, as the agent's worker was told."""
    (up,) = agent.last(1)
    return str(up["MASTER_ADDR"]), int(up["MASTER_PORT"])


def uses_store(host: Host, store: tuple[str, int]) -> str:
    """Whether a process on this host is served by the store."""
    command = [*host.entry, sys.executable, "-c", STORE, store[0], str(store[1]), PROBE]
    return completed(command, timeout=150, check=True).stdout.strip()


@pytest.mark.parametrize(("backend", "kind"), [("c10d", "c"), ("static", "python")])
def test_only_the_members_of_a_round_use_its_store(cluster: Cluster, backend: str, kind: str) -> None:
    first, second, outsider = (cluster.host(name) for name in ("A", "B", "outsider"))
    cluster.backend, cluster.nnodes = backend, "2"
    env = {"RALLYPOINT_STORE": kind}
    agents = [cluster.start(name, f"--node-rank={rank}", env=env) for rank, name in enumerate("AB")]
    cluster.all_up(agents)
    store = store_of(agents[0])
    assert [uses_store(host, store) for host in (first, second, outsider)] == ["served", "served", "refused"]
    agents[0].job.until_err(f"the store is closing the connection from {outsider.address}:")
    assert not [agent.name for agent in agents if ANYBODY in agent.job.err]
    cluster.finish(agents)


def test_who_takes_a_lost_member_s_place_may_use_the_next_store_and_the_lost_one_may_not(cluster: Cluster) -> None:
    agents = [cluster.start(name, f"--node-rank={rank}", "--max-restarts=1") for rank, name in enumerate("ABC")]
    cluster.nnodes = "2:3"
    cluster.all_up(agents)
    agents[2].is_killed()
    agents[2].job.ends()
    all_up(agents[:2], starts=2, world_size=2)
    store = store_of(agents[0])
    assert [uses_store(agent.host, store) for agent in agents] == ["served", "served", "refused"]
    cluster.finish(agents[:2])


def test_a_member_may_come_from_another_of_its_interfaces(cluster: Cluster) -> None:
    """The control plane is in one network, and the store is known by its address in another one."""
    first, second, outsider = (cluster.host(name) for name in ("A", "B", "outsider"))
    other = second_address(first, 1)
    second_address(second, 2)
    second_address(outsider, 9)
    cluster.nnodes = "2"
    agents = [cluster.start("A", "--node-rank=0", f"--local-addr={other}"), cluster.start("B", "--node-rank=1")]
    cluster.all_up(agents)
    store = store_of(agents[0])
    assert store[0] == other
    assert [uses_store(host, store) for host in (first, second, outsider)] == ["served", "served", "refused"]
    cluster.finish(agents)


def test_behind_address_translation_nobody_is_refused_and_one_line_says_so(cluster: Cluster) -> None:
    """A host in between hands every connection to the control plane on, which then comes from that host's address."""
    first, _, between = (cluster.host(name) for name in ("A", "B", "between"))
    script = cluster.launcher.script(BALANCER, "balancer.py")
    relay = cluster.launcher.command([*between.entry, sys.executable, script, first.address, str(PORT)])
    relay.until(lambda lines: lines == ["serves"], "it listens")
    cluster.where, cluster.nnodes = f"{between.address}:{PORT}", "2"
    agents = []
    for rank, name in enumerate("AB"):
        cluster.conf = f"is_host={'true' if rank == 0 else 'false'}"
        agents.append(cluster.start(name, f"--node-rank={rank}", "--max-restarts=1"))
    cluster.all_up(agents)
    cluster.say("fail-B-0")
    cluster.all_up(agents, starts=2)
    assert uses_store(between, store_of(agents[0])) == "served"
    lines = [line for agent in agents for line in agent.job.err.splitlines() if ANYBODY in line]
    assert len(lines) == 1
    assert f"(rank 1) has the address {agents[1].host.address} and is seen as {between.address}" in lines[0]
    cluster.finish(agents)
    relay.stop()


def test_hosts_that_have_ipv6_alone_meet_and_use_the_store(cluster: Cluster) -> None:
    hosts = [cluster.host(name) for name in ("A", "B", "outsider")]
    for number, host in enumerate(hosts, 1):
        ip("-n", host.namespace, "-6", "address", "add", f"fd77::{number}/64", "dev", "eth0", "nodad")
        ip("-n", host.namespace, "-4", "address", "flush", "dev", "eth0")
    cluster.where, cluster.nnodes = f"[fd77::1]:{PORT}", "2"
    agents = [cluster.start(name, f"--node-rank={rank}") for rank, name in enumerate("AB")]
    cluster.all_up(agents)
    store = store_of(agents[0])
    assert store[0] == "fd77::1"
    assert [uses_store(host, store) for host in hosts] == ["served", "served", "refused"]
    assert f"the control plane listens at [fd77::1]:{PORT} {WITHOUT}" in agents[0].job.err
    cluster.finish(agents)


@pytest.mark.parametrize(
    ("names", "nnodes"),
    [("::1 localhost", "1"), ("127.0.0.1 localhost\n::1 localhost", "1:2"), ("127.0.1.1 localhost", "1:2")],
)
def test_whatever_localhost_stands_for_a_job_meets_there(cluster: Cluster, names: str, nnodes: str) -> None:
    first, outsider = cluster.host("A"), cluster.host("outsider")
    file = cluster.launcher.folder / "hosts"
    file.write_text(f"{names}\n")
    cluster.within = ["unshare", "-m", "sh", "-c", BOUND, str(file)]
    flags = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{PORT}", f"--nnodes={nnodes}", "--rdzv-id=job"]
    agent = cluster.alone("A", [*flags, "--rdzv-conf=last_call_timeout=1"])
    cluster.all_up([agent])
    assert uses_store(first, store_of(agent)) == "served"
    assert knock(outsider, first.address, PORT) == ("refused" if nnodes == "1" else "connected")
    assert (WITHOUT in agent.job.err) == (nnodes != "1")
    cluster.finish([agent])
