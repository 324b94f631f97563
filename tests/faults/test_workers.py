"""Workers that do not go when they are asked, and what they have started."""

from __future__ import annotations

import os
import signal

import pytest

from tests.faults.cluster import Cluster
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


@pytest.mark.torch
def test_loaders_of_a_killed_worker_are_gone(cluster: Cluster) -> None:
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
