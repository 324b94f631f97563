"""Real torch in preloaded workers: the same loss, whole and after a kill; the differential suite under `--preload`."""

from __future__ import annotations

import os
import re
import signal
from contextlib import closing
from pathlib import Path

import pytest

from tests.conformance import test_side_by_side as side_by_side
from tests.conformance.record import Record
from tests.conformance.side_by_side.case import Case
from tests.jobs import launching
from tests.jobs.launching import Job, Launcher
from tests.progress_pipe import ProgressPipe

pytestmark = pytest.mark.torch

TRAINING = str(Path(__file__).parents[2] / "examples" / "train_ddp.py")
EVERY = 10
"""One in so many cases of the differential suite runs here; `make conformance-preload` runs them all."""


@pytest.mark.parametrize("case", side_by_side.CASES[::EVERY], ids=lambda case: case.name)
def test_both_leave_the_same(launcher: Launcher, record: Record, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "PRELOAD", "json")
    side_by_side.test_side_by_side(launcher, record.at_rest(), case)


def loss(job: Job) -> str:
    assert job.ends() == 0, job.err
    (found,) = re.findall(r"^final loss (\d+\.\d{9})$", "\n".join(job.out), re.MULTILINE)
    assert isinstance(found, str)
    return found


def test_training_ends_with_the_same_loss_before_and_after_a_kill(launcher: Launcher) -> None:
    common = ("--standalone", "--nproc-per-node=2", "--max-restarts=1")
    model = (TRAINING, "--steps=60", "--every=10")
    cold = loss(launcher(*common, *model))
    with closing(ProgressPipe(launcher.folder / "progress")) as told:
        shown = (f"--checkpoint-dir={launcher.folder / 'checkpoint'}", f"--progress={told.path}")
        job = launcher(*common, "--preload=torch", *model, *shown, env={"LOGLEVEL": "DEBUG"})
        told.until("step", 25, "step 25")
        (victim,) = [each for each in told.events("training") if each["rank"] == 1]
        os.kill(int(victim["pid"]), signal.SIGKILL)
        told.release()
        assert loss(job) == cold
        told.read_rest()
        resumed = [each["step"] for each in told.events("training")[2:]]
    assert len(resumed) == 2
    assert min(resumed) >= 20
    assert "without preloading" not in job.err
    assert "torch is imported; workers will be forked from process" in job.err


TRAINED = """
import os, signal, sys
early = all(name in sys.modules for name in ("torch", "torch._dynamo"))

def main():
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from rallypoint import notices

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    notices.progress(1)
    os.write(1, f"trained {os.environ['RANK']} {early} {os.getpid()}\\n".encode())
    if not os.path.exists("finish"):
        signal.pause()
    dist.barrier()
    del model, optimizer  # first what holds the group, as in the example
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


def test_torch_is_preloaded_for_a_script_that_imports_it(launcher: Launcher) -> None:
    flags = ("--standalone", "--nproc-per-node=2", "--max-restarts=1", "--preload=auto")
    job = launcher(*flags, launcher.script(TRAINED), env={"LOGLEVEL": "INFO"})

    def trained(count: int) -> list[list[str]]:
        lines = job.until(lambda lines: sum(each.startswith("trained") for each in lines) >= count, f"{count} trained")
        return [line.split() for line in lines if line.startswith("trained")]

    first = trained(2)
    job.until_err("workers will be forked from process")
    (launcher.folder / "finish").touch()
    os.kill(int(first[0][3]), signal.SIGKILL)
    assert job.ends() == 0, job.err
    assert [words[2] for words in trained(4)] == ["False"] * 2 + ["True"] * 2
    assert re.search(r"Preloaded for restarted workers: (rallypoint, )?torch, (rallypoint, )?torch\._dynamo", job.err)
    assert "without preloading" not in job.err


NUMBERS = """
import os, torch
import torch.distributed as dist
loaded = [each.tolist() for each in torch.utils.data.DataLoader(range(8), batch_size=2, num_workers=2)]
dist.init_process_group("gloo")
mine = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(mine)
a = torch.randn(200, 200, dtype=torch.float64)
facts = [mine.item(), torch.initial_seed() >= 0, torch.randn(3).tolist(), (a @ a).sum().item(), torch.get_num_threads(),
    loaded, torch.cuda.is_available(), os.environ.get("OMP_NUM_THREADS")]
dist.destroy_process_group()
if os.environ["RANK"] == "0":
    os.write(1, (repr(facts) + "\\n").encode())
"""


@pytest.mark.parametrize("threads", ["1", "2", ""], ids=lambda each: f"{each or 'default'} threads")
def test_torch_computes_what_it_computes_without_preloading(launcher: Launcher, threads: str) -> None:
    script = launcher.script("import torch\ntorch.manual_seed(7)\n" + NUMBERS)
    outs = []
    flags = ("--standalone", *(("--nproc-per-node=2",) if threads == "1" else ()))
    # Tensors of a data loader pass through sockets in the temporary folder, on paths that must be short.
    env = {"TMPDIR": "/tmp", **({"OMP_NUM_THREADS": threads} if threads else {})}
    for preload in ((), ("--preload=torch,numpy,networkx,fsspec",)):  # the last two go through all variables
        job = launcher.command([*launching.RALLYRUN, *flags, *preload, script], env)
        assert job.ends() == 0, job.err
        assert "without preloading" not in job.err, job.err
        outs.append(job.out)
    assert outs[0] == outs[1]
