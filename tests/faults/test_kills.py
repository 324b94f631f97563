"""SIGKILL to each part of a job; only the remaining parts clean up."""

from __future__ import annotations

import os
import signal

import pytest

from tests.faults.cluster import LEASE, SOON, Cluster, gone, stays
from tests.jobs.nodes import all_up, common
from tests.waiting import until

LOADER = """
import os, sys, tempfile, torch
tempfile.tempdir = "/proc/self/cwd"  # multiprocessing leaves files on a SIGKILL, and has little room for their paths
from torch.utils.data import DataLoader, Dataset
class Endless(Dataset):
    def __len__(self):
        return 1 << 40
    def __getitem__(self, index):
        return torch.zeros(8)
def main():
    loader = DataLoader(Endless(), batch_size=4, num_workers=2, sampler=iter(lambda: 0, 1))
    for number, _ in enumerate(loader):
        if number == 4:
            children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
            os.write(1, f"loading {os.environ['RANK']} {os.getpid()} {len(children)}\\n".encode())
if __name__ == "__main__":
    main()
"""


def test_of_an_agent_takes_its_workers_along_and_the_others_regroup(cluster: Cluster) -> None:
    cluster.lease = 4 * SOON
    a, b, c = cluster.three()
    killed = c.is_killed()
    until(lambda: gone(c.pid), "the dead agent's worker is gone too", SOON)
    assert c.job.ends() == -signal.SIGKILL
    until(lambda: not c.host.pids(), "nothing runs on the dead agent's host", SOON)
    cluster.all_up([a, b], starts=2)
    assert max(a.up_at, b.up_at) - killed < SOON
    assert common([a, b], [1, 1], "TORCHELASTIC_RESTART_COUNT") == "0"
    cluster.finish([a, b])


def test_of_the_agent_of_group_rank_0(cluster: Cluster) -> None:
    """The workers' store of the round goes with it."""
    cluster.lease = 4 * SOON
    control = cluster.serve()
    agents = cluster.three()
    (first,) = [agent for agent in agents if agent.ups[-1]["GROUP_RANK"] == "0"]
    others = [agent for agent in agents if agent is not first]
    killed = first.is_killed()
    cluster.all_up(others, starts=2)
    assert max(agent.up_at for agent in others) - killed < SOON
    assert first.host.address not in {agent.ups[-1]["MASTER_ADDR"] for agent in others}
    cluster.finish(others)
    control.stop()


def test_of_the_agent_that_hosts_the_control_plane(cluster: Cluster) -> None:
    cluster.lease = LEASE
    a, b, c = cluster.three()
    a.is_killed()
    stays([b, c], 2 * LEASE)  # its loss alone does not stop the workers of the others
    replacement = cluster.start("A2", on="A")
    replacement.comes_up(1, world_size=3)
    all_up((b, c), starts=2, world_size=3)
    cluster.finish([replacement, b, c])
    assert common([replacement, b, c], [1, 1, 1], "TORCHELASTIC_RESTART_COUNT") == "0"


@pytest.mark.torch
def test_of_a_worker_takes_its_loaders_along(cluster: Cluster) -> None:
    cluster.nnodes = "2"
    script = cluster.launcher.script(LOADER, "loader.py")
    agents = [cluster.run(name, [script]) for name in "AB"]
    pids = {}
    for agent in agents:
        lines = agent.job.until(lambda lines: any(line.startswith("loading") for line in lines), "the loader loads")
        (line,) = [line for line in lines if line.startswith("loading")]
        _, rank, pid, children = line.split()
        pids[int(rank)] = int(pid)
        assert int(children) >= 2
    os.kill(pids[0], signal.SIGKILL)
    for agent in agents:
        assert agent.job.ends() == 1
        assert "rank 0 failed on" in agent.job.err or f"exitcode  : -9 (pid: {pids[0]})" in agent.job.err
    until(lambda: not any(agent.host.pids() for agent in agents), "nothing runs on the hosts", 1.0)
