"""Hosts cut off, and packets lost, without FIN or RST."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest

from tests.faults.cluster import LEASE, SAFE_LEASE, SOON, Cluster, gone, stays
from tests.jobs.nodes import all_up, common
from tests.waiting import until


@pytest.mark.parametrize("lease", [SAFE_LEASE, None], ids=["6s", "default"])
def test_down_for_less_than_the_lease_is_not_noticed(cluster: Cluster, lease: float | None) -> None:
    """Well below it: what was sent meanwhile has to arrive in time too, and TCP pauses before it tries again."""
    cluster.lease = lease
    agents = cluster.three()
    with agents[2].host.unplugged():
        stays(agents, 1.5 if lease else 0.5)
    stays(agents, 1.5 * (lease or 3.0))
    cluster.finish(agents)
    assert [len(agent.ups) for agent in agents] == [1, 1, 1]


@pytest.mark.parametrize(
    ("lease", "carrier"), [(4.0, True), (4.0, False), (None, True)], ids=["4s", "4s, no carrier", "default"]
)
def test_down_for_more_than_the_lease(cluster: Cluster, lease: float | None, carrier: bool) -> None:
    cluster.lease = lease
    a, b, c = cluster.three()
    with c.host.unplugged(carrier=carrier):
        cut = time.monotonic()
        cluster.all_up([a, b], starts=2)
        assert max(a.up_at, b.up_at) - cut < (lease or 3.0) + SOON
    cluster.all_up([a, b, c], starts=2)  # its second start, their third
    assert common([a, b, c], [1, 1, 1], "TORCHELASTIC_RESTART_COUNT") == "0"
    cluster.finish([a, b, c])
    assert [len(agent.ups) for agent in (a, b, c)] == [3, 3, 2]


def test_no_worker_starts_on_a_place_that_is_older_than_the_lease(cluster: Cluster) -> None:
    """C is cut off when it has its place, and its old worker is still to be killed; then the others run without it."""
    cluster.lease, cluster.conf = 4.0, "failure_grace=10"
    cluster.host("A")
    agents = [cluster.start(name, "--max-restarts=1", env={"DEAF": "1"} if name == "C" else {}) for name in "ABC"]
    cluster.all_up(agents)
    a, b, c = agents
    old = c.pid
    cluster.say("fail-B-0")
    all_up((a, b), starts=2, world_size=3)
    with c.host.unplugged():
        until(lambda: gone(old), "the old worker is killed")
        all_up((a, b), starts=3, world_size=2)
        c.job.until_err("the workers will start when it confirms their round")
        stays([a, b], cluster.lease)
        assert len(c.ups) == 1, "a worker was started in a round that is over"
    for agent, starts in ((a, 4), (b, 4), (c, 2)):
        agent.comes_up(1, starts=starts, world_size=3)
    cluster.finish(agents)


def test_fenced_workers_of_a_node_that_is_cut_off_are_gone_before_the_others_start_anew(cluster: Cluster) -> None:
    cluster.lease = LEASE
    cluster.host("A")
    a, b, c = agents = [cluster.start(name, "--fence", "--max-restarts=0") for name in "ABC"]
    cluster.all_up(agents)
    old = c.pid
    with c.host.unplugged():
        until(lambda: gone(old), "the reaper kills its worker")
        c.job.until_err("the control plane was silent for a whole lease")
        cluster.all_up([a, b], starts=2)
        assert len(c.ups) == 1
    cluster.all_up([a, b, c], starts=2)
    cluster.finish(agents)


def test_of_the_control_plane_down_for_more_than_the_lease(cluster: Cluster) -> None:
    """Both sides see the others go. Only the side with the control plane may say what follows, and it is below 2."""
    cluster.lease = LEASE
    a, b, c = cluster.three()
    with a.host.unplugged():
        until(lambda: gone(int(a.ups[0]["pid"])), "the host of the control plane, alone, stops its worker")
        stays([b, c], 2 * LEASE)
    cluster.all_up([a, b, c], starts=2)
    cluster.finish([a, b, c])


def test_five_percent_loss(cluster: Cluster) -> None:
    """During rendezvous, a failure, a regroup and the end."""
    cluster.lease = LEASE
    agents = []
    with ExitStack() as losses:
        for name in "ABC":
            losses.enter_context(cluster.host(name).losing(5))
            agents.append(cluster.start(name, "--max-restarts=1"))
        # A lost packet can cost more than this lease, and then a node is taken out and comes back: what counts is the
        # end, not the number of rounds on the way.
        all_up(agents, world_size=3)
        cluster.say("fail-B-0")
        until(lambda: all(agent.ups[-1]["TORCHELASTIC_RESTART_COUNT"] == "1" for agent in agents), "all are restarted")
        late = cluster.start("C2", on="C")
        agents[2].is_killed()
        survivors = [*agents[:2], late]
        all_up(survivors, world_size=3)
        until(lambda: sum(agent.host.retransmissions() for agent in agents) > 0, "packets were lost")
        cluster.finish(survivors)
