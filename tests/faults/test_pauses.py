"""An agent stopped by SIGSTOP for longer than its lease finds that the others have continued without it."""

from __future__ import annotations

import os
import signal

from tests.faults.cluster import SOON, Cluster, gone, stays
from tests.jobs.nodes import all_up
from tests.waiting import until

LEASE = 4.0


def test_longer_than_the_lease(cluster: Cluster) -> None:
    cluster.lease = LEASE
    a, b, c = cluster.three()
    old = c.pid
    c.job.signal(signal.SIGSTOP)
    cluster.all_up([a, b], starts=2)
    c.job.signal(signal.SIGCONT)
    until(lambda: gone(old), "the agent stops its old worker", LEASE + SOON)
    cluster.all_up([a, b, c], starts=2)
    cluster.finish([a, b, c])
    assert len(c.ups) == 2


def test_longer_than_the_lease_with_no_place_left(cluster: Cluster) -> None:
    """A spare has taken its place: it becomes the spare."""
    cluster.lease = LEASE
    cluster.nnodes = "2:2"
    a, b = (cluster.start(name) for name in "AB")
    cluster.all_up([a, b])
    spare = cluster.start("S")
    spare.job.until_err("waits as a spare")
    old = b.pid
    b.job.signal(signal.SIGSTOP)
    a.comes_up(1, starts=2, world_size=2)
    spare.comes_up(1, world_size=2)
    b.job.signal(signal.SIGCONT)
    until(lambda: gone(old), "the agent stops its old worker", LEASE + SOON)
    b.job.until_err("waits as a spare")
    cluster.finish([a, spare, b])
    assert len(b.ups) == 1


def test_longer_than_the_lease_with_a_place_that_was_not_taken_yet(cluster: Cluster) -> None:
    """All processes of C freeze when it has its place, and thaw where it cannot hear that the others run without it."""
    cluster.lease, cluster.conf = 4.0, "failure_grace=10"
    a, b, c = agents = [
        cluster.start(name, "--max-restarts=1", env={"DEAF": "1"} if name == "C" else {}) for name in "ABC"
    ]
    cluster.all_up(agents)
    cluster.say("fail-B-0")
    all_up((a, b), starts=2, world_size=3)
    old, frozen = c.pid, c.host.pids()
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    all_up((a, b), starts=3, world_size=2)
    with c.host.unplugged():
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        until(lambda: gone(old), "the old worker is killed")
        c.job.until_err("the workers will start when it confirms their round")
        assert len(c.ups) == 1, "a worker was started in a round that is over"
    for agent, starts in ((a, 4), (b, 4), (c, 2)):
        agent.comes_up(1, starts=starts, world_size=3)
    cluster.finish(agents)


def test_fenced_workers_of_an_agent_that_is_frozen_are_gone_before_the_others_start_anew(cluster: Cluster) -> None:
    """Nor do they run once all of it thaws."""
    cluster.lease = LEASE
    a, b, c = agents = [cluster.start(name, "--fence") for name in "ABC"]
    cluster.all_up(agents)
    old = c.pid
    c.job.signal(signal.SIGSTOP)
    until(lambda: gone(old), "the reaper kills its worker", LEASE + SOON)
    cluster.all_up([a, b], starts=2)
    c.job.signal(signal.SIGCONT)
    cluster.all_up([a, b, c], starts=2)
    cluster.finish(agents)


def test_of_the_control_planes_host(cluster: Cluster) -> None:
    """Its clock has gone on while it could hear nobody: that is no reason to take anybody out."""
    cluster.lease = LEASE
    agents = cluster.three()
    agents[0].job.signal(signal.SIGSTOP)
    stays(agents, 3 * LEASE)  # the others give their connections up and dial again
    agents[0].job.signal(signal.SIGCONT)
    stays(agents, 2 * LEASE)
    cluster.finish(agents)
    assert [len(agent.ups) for agent in agents] == [1, 1, 1]
