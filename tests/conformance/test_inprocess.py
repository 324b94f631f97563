"""Real training that goes on in process, through kills (`make inprocess-kills` for many more, and for nodes)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.inprocess_kills import Kills, Plan
from tests.jobs.launching import Launcher, run_at_once

pytestmark = pytest.mark.torch

CALM = Plan(kills=0, nodes=1, least=1, workers=1, steps=60, batch=6, seed=4, agents=0.0, at_once=0.0)


def test_the_loss_is_that_of_an_undisturbed_job(tmp_path: Path) -> None:
    losses: dict[int, float] = {}

    def undisturbed(rallyrun: Launcher) -> None:
        losses[0] = Kills(rallyrun, CALM).run().loss

    def killed(rallyrun: Launcher) -> None:
        found = Kills(rallyrun, CALM._replace(kills=4, workers=3)).run()
        losses[4] = found.loss
        assert found.killed_workers == 4
        assert found.kept >= found.rounds - 1, "in each new round somebody has survived"
        assert found.lost_steps <= 4, "no more than that in which the kill came"

    run_at_once(tmp_path, undisturbed, killed)
    assert losses[4] == pytest.approx(losses[0], abs=1e-6)


INTERRUPTED = """
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from rallypoint.inprocess import torch_groups

def fail(*_args, **_options):
    raise KeyboardInterrupt
made, c10d.ProcessGroupGloo = c10d.ProcessGroupGloo, fail
for _ in range(2):
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    except KeyboardInterrupt:
        torch_groups.destroy()
c10d.ProcessGroupGloo = made
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(dist.group.WORLD.group_name)
torch_groups.abort()
torch_groups.destroy()
print(dist.is_initialized())
"""


def test_groups_have_the_names_that_they_have_in_new_workers_after_an_interruption() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False, timeout=90)
    assert done.stdout.split() == ["0", "False"], done.stderr
