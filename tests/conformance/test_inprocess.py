"""Real training that continues in process through kills (`make inprocess-kills` has many more, and nodes)."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.inprocess_kills import Kills, Plan
from tests.jobs.launching import Launcher, launching, run_at_once
from tests.processes import completed
from tests.unit.inprocess.agent import worker

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
from rallypoint.inprocess import aborting

def fail(*_args, **_options):
    raise KeyboardInterrupt
made, c10d.ProcessGroupGloo = c10d.ProcessGroupGloo, fail
for _ in range(2):
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    except KeyboardInterrupt:
        aborting.destroy_groups()
c10d.ProcessGroupGloo = made
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(dist.group.WORLD.group_name)
aborting.abort_groups()
aborting.destroy_groups()
print(dist.is_initialized())
"""


def test_groups_have_the_names_that_they_have_in_new_workers_after_an_interruption() -> None:
    done = completed([sys.executable, "-c", INTERRUPTED])
    assert done.stdout.split() == ["0", "False"], done.stderr


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "in-process.md"
AROUND = """
import os, sys, time
from types import SimpleNamespace
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from rallypoint import inprocess

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

class Model(torch.nn.Linear):
    def __init__(self, options):
        super().__init__(2, 1)

def load_checkpoint(state):
    say("checkpoint")
    return 100

reached = []
def batch(step):
    reached.append(step)
    count, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    if count == "0" or (count == "1" and step == 102):
        say("dies" if rank == "1" else "lives", step, os.getpid())
        while True:  # a signal just before `pause` would be waited for in vain
            time.sleep(0.01)
    return torch.ones(2)

def loss(ddp, batch):
    return ddp(batch).sum()

SNIPPET
    say("done", reached[-1])
train(SimpleNamespace(steps=103))
"""


def snippet() -> str:
    """The function of the page that trains from a checkpoint."""
    blocks = PAGE.read_text().split("```python\n")[1:]
    (found,) = [text for block in blocks if "load_checkpoint" in (text := block.partition("```")[0])]
    return found


def test_the_function_of_the_page_reads_the_checkpoint_once(tmp_path: Path) -> None:
    """A worker dies before the first step after a resume from step 100, and another after that step: each time the
    survivor's state is sent.
    """
    with launching(tmp_path) as rallyrun:
        script = rallyrun.script(AROUND.replace("SNIPPET", snippet()))
        # Each new worker would import them anew, which DistributedDataParallel() does: minutes on a busy machine.
        slow = "--preload=torch,torch._dynamo"
        job = rallyrun("--standalone", "--nproc-per-node=2", "--max-restarts=2", slow, script)
        for count in (1, 2):
            lines = job.until(partial(all_at_rest, 2 * count), "both are at a step")
            os.kill(next(int(line.split()[2]) for line in reversed(lines) if line.startswith("dies")), signal.SIGKILL)
        assert job.ends() == 0, job.err
    steps = [line.rpartition(" ")[0] for line in job.out if line.startswith(("lives", "dies"))]
    assert sorted(steps) == ["dies 101", "dies 102", "lives 101", "lives 102"]
    assert job.out.count("checkpoint") == 2, "by both, in the first round"
    assert job.out.count("done 103") == 2


def all_at_rest(count: int, lines: list[str]) -> bool:
    """Whether so many workers, of all rounds, have waited for the death of one."""
    return sum(line.startswith(("lives", "dies")) for line in lines) == count


LOADS = """
import torch
class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        return index
@inprocess.resumable
def train(round):
    if os.environ["RANK"] == "10":
        return
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=2)
    for _ in loader:
        say("in")
        sys.stdin.readline()
        raise ConnectionError("another worker is gone")
train()
"""


def test_the_end_of_a_data_loader_is_not_cut(tmp_path: Path) -> None:
    """The round ends while an error leaves the loop, whose iterator then ends its processes."""
    with worker(tmp_path, LOADS, RANK="0") as agent:
        assert agent.process.stdin is not None
        for number in range(10):
            assert agent.line() == "in"
            agent.process.stdin.write(b"\n")
            time.sleep(number * 0.005)  # what the kills of a job come at: any moment of the clean-up
            agent.next_round(number, RANK=str(number + 1))
        code, errors = agent.end()
    assert (code, "Exception ignored" in errors) == (0, False), errors


def test_a_step_that_is_interrupted_leaves_no_switch_and_no_lock(tmp_path: Path) -> None:
    """`python -m tests.interruptions` for thousands."""
    done = completed([sys.executable, "-m", "tests.interruptions", "--number=150", "--loader-workers=0"], check=False)
    assert (done.returncode, "left nothing" in done.stdout) == (0, True), done.stdout + done.stderr


SWITCHED = """
import torch
@inprocess.resumable
def train(round):
    if round.survived:
        say(torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled(),
            torch.get_default_dtype(), torch.is_anomaly_enabled(), torch.autocast_increment_nesting(),
            (torch.nn.Linear(2, 2)(torch.ones(2)) * 1).requires_grad)
        return
    torch.set_default_dtype(torch.float64)
    torch.set_anomaly_enabled(True)
    torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
    torch.set_grad_enabled(False)
    round.memory["mode"] = torch.inference_mode()
    round.memory["mode"].__enter__()
    say("switched")
    time.sleep(60)
train()
"""


def test_what_a_function_has_switched_is_restored_when_it_leaves_its_round(tmp_path: Path) -> None:
    with worker(tmp_path, SWITCHED) as agent:
        assert agent.line() == "switched"
        agent.next_round(0)
        assert agent.line() == "True False False torch.float32 False 1 True"
        assert agent.end()[0] == 0
