"""`--preflight`: agents dial each other before their workers start, and report unreachable nodes and who tried."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.faults.cluster import Agent, Cluster
from tests.faults.network import Host, ip
from tests.jobs.nodes import all_up

NAMED = ["unshare", "--uts", "sh", "-c", 'hostname "$NODE" && exec "$@"', "sh"]
"""What an agent's command line begins with, so that its host has the name of the node."""
PLACE = r"\(10\.77\.0\.\d:\d+\)"


@contextmanager
def refusing(host: Host, other: Host) -> Iterator[None]:
    """No connection from the other host is let in here, in this direction only, but for those to the control plane."""
    if shutil.which("iptables") is None:
        pytest.skip("needs iptables (Debian: apt-get install iptables)")
    rule = f"INPUT -s {other.address} -p tcp --syn -j REJECT --reject-with icmp-host-unreachable"
    subprocess.run([*host.entry, "iptables", "-A", *rule.split()], check=True, timeout=30)
    yield


def lines(agent: Agent) -> list[str]:
    """What it has logged as a warning of nodes that are not reached."""
    found = [line for line in agent.job.err.split("\n") if "mesh.py:" in line and line.startswith("W")]
    return [line.partition("] ")[2] for line in found]


@pytest.fixture
def three(cluster: Cluster) -> Cluster:
    """Three hosts, on which nothing runs yet."""
    cluster.within = NAMED
    cluster.nnodes = "3"
    for name in "abc":
        cluster.host(name)
    return cluster


def test_a_node_that_another_cannot_reach_is_told_and_the_job_runs(three: Cluster) -> None:
    with refusing(three.host("b"), three.host("c")):
        agents = [three.start(name, "--preflight=warn") for name in "abc"]
        three.all_up(agents)
    three.finish(agents)
    for agent in agents:
        (line,) = lines(agent)
        assert re.match(rf"c cannot reach b {PLACE}: no route to host; check firewalls", line), line


def test_where_it_is_required_the_job_ends_everywhere_before_a_worker_starts(three: Cluster) -> None:
    with refusing(three.host("b"), three.host("c")):
        flags = ("--preflight=require", "--max-restarts=3", "--exit-codes=classified")
        agents = [three.start(name, *flags) for name in "abc"]
        assert [agent.job.ends() for agent in agents] == [75, 75, 75]
    for agent in agents:
        assert not agent.ups
        last = agent.job.err.rstrip().split("\n")
        assert any(re.search(rf"c cannot reach b {PLACE}: no route to host; check firewalls", line) for line in last)
        assert "restart" not in last[-1]


def test_a_host_without_a_route_is_told_by_both_sides(three: Cluster) -> None:
    b, c = three.host("b"), three.host("c")
    ip("-n", c.namespace, "route", "add", "unreachable", f"{b.address}/32")
    agents = [three.start(name, "--preflight=warn") for name in "abc"]
    three.all_up(agents)
    three.finish(agents)
    told = "\n".join(lines(agents[0]))
    assert re.search(rf"c cannot reach b {PLACE}: no route to host", told)
    assert re.search(rf"b cannot reach c {PLACE}: connection timed out", told)


def test_two_hosts_of_one_address_are_told_apart(three: Cluster) -> None:
    """As with Docker's bridge: each host has it, and reaches itself there."""
    for name in "abc":
        ip("-n", three.host(name).namespace, "address", "add", "172.17.0.1/16", "dev", "lo")
    flags = ["--preflight=require", "--max-restarts=1"]
    first = three.start("a", *flags)
    others = [three.start(name, *flags, "--local-addr=172.17.0.1") for name in "bc"]
    assert [agent.job.ends() for agent in (first, *others)] == [1, 1, 1]
    text = r"b cannot reach c \(172\.17\.0\.1:\d+\): connection refused \(172\.17\.0\.1 is an address of b too\)"
    assert re.search(text, first.job.err) or "nodes cannot reach" in first.job.err, first.job.err


def test_a_node_that_leaves_meanwhile_is_not_waited_for_and_one_that_comes_dials_nobody(three: Cluster) -> None:
    three.nnodes = "2:3"
    b, c = three.host("b"), three.host("c")
    ip("-n", c.namespace, "route", "add", "unreachable", f"{b.address}/32")  # so that b does not end for 5 s
    agents = [three.start(name, "--preflight=require", "--max-restarts=1") for name in "abc"]
    agents[1].job.until_err("Rendezvous complete for workers")
    agents[1].job.signal(signal.SIGTERM)
    assert agents[1].job.ends() in (0, 1), agents[1].job.err
    assert not agents[1].ups
    assert not agents[1].host.listening()
    left = [agents[0], agents[2]]
    three.all_up(left)
    late = three.start("b2", "--preflight=require", "--max-restarts=1", on="b")
    all_up((*left, late), world_size=3)
    three.finish([*left, late])
    assert "cannot reach" not in "".join(agent.job.err for agent in (*left, late)), "it was not done again"
