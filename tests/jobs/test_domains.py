"""Nodes of domains, each a real agent: a node of the same domain fills a hole, or else a whole segment moves in."""

from __future__ import annotations

from tests.jobs.launching import TIMEOUT, Launcher
from tests.jobs.nodes import Node, all_end, all_up, c10d, common
from tests.jobs.test_steering import Operator, endpoint_of
from tests.waiting import until

SLURM = {"SLURM_TOPOLOGY_ADDR": "root.rack-b.n7.example.org", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.block.node"}


def shown(ask: Operator, node: Node) -> tuple[str, str, str | None]:
    """State, domain, and what it waits for, of a node that is about to come."""
    (found,) = until(
        lambda: [each for each in ask.status()[1]["nodes"] if each["pid"] == node.job.pid],
        lambda: f"node {node.name} has come:\n{node.job.err}",
        TIMEOUT,
    )
    return found["state"], found["domain"], found["waits_for"]


def test_a_hole_is_filled_from_its_own_domain_and_else_a_whole_segment_moves_in(rallyrun: Launcher) -> None:
    job = c10d(rallyrun, "2", "--segment=2")
    first = job.start("A1", "--node-domain=rack-a", env={"LOGLEVEL": "INFO"})
    first.job.until_err("control plane listens on port")
    ask = Operator(rallyrun, f"127.0.0.1:{endpoint_of(first)}")
    second = job.start("A2", "--node-domain=rack-a")
    all_up((first, second), world_size=2)
    keeps = first.ranks(1)

    other = job.start("B1", "--node-domain=auto", env=SLURM | {"LOGLEVEL": "INFO"})
    other.job.until_err("this node is in domain rack-b, as reported by SLURM_TOPOLOGY_ADDR")
    assert shown(ask, other) == ("spare", "rack-b", "a place: all are taken")
    spare = job.start("A3", env={"PET_NODE_DOMAIN": "rack-a"})
    assert shown(ask, spare) == ("spare", "rack-a", "a place: all are taken")
    assert shown(ask, first) == ("participant", "rack-a", None)

    second.dies()
    first.comes_up(1, starts=2, world_size=2)
    spare.comes_up(1, world_size=2)
    assert first.ranks(1) == keeps, "who is still there keeps its rank"
    assert not other.ups, "the spare that came first is of another domain"

    spare.dies()
    first.job.until_err("whole segments of 2 nodes of one domain")
    code, text = ask("status")
    assert (code, "in whole segments" in text) == (3, True), text
    assert "no whole segment in its domain (1 of 2 nodes)" in text
    another = job.start("B2", "--node-domain=rack-b")
    all_up((other, another), world_size=2)
    assert sorted([*other.ranks(1), *another.ranks(1)]) == [0, 1]
    assert common([other, another], [1, 1], "TORCHELASTIC_RESTART_COUNT") == "0"
    assert len(first.ups) == 2, "its segment is not whole: it is a spare now"
    job.say("finish")
    all_end([other, another, first], 0)


def test_a_job_cannot_have_segments_that_do_not_divide_it(rallyrun: Launcher) -> None:
    node = c10d(rallyrun, "3", "--segment=2").start("A")
    assert node.job.ends() == 2
    assert "--segment=2 does not divide the minimum of --nnodes, which is 3" in node.job.err
