"""Like train_ddp.py, but when a worker dies, the others continue in their processes with their models in memory.

    rallyrun --standalone --nproc-per-node=2 --max-restarts=3 --standby=1 examples/train_ddp_inprocess.py

When a round ends, `train` is interrupted, and called again in the next round. By then, some workers may have finished a
step that others have not, and new workers have no state. All workers receive the state of the worker that is furthest
ahead (`round.agree`). The checkpoint is read only if no worker has a state. Each process builds its model once, before
its first round (`prepare`). With `--standby`, an additional process has already done so when a worker dies, and takes
its place.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rallypoint import inprocess

if TYPE_CHECKING:
    import argparse

    from examples.train_ddp import CONTEXT, Checkpoint, Progress, build_model, corpus, main, share
else:
    from train_ddp import CONTEXT, Checkpoint, Progress, build_model, corpus, main, share


class Training:
    """What a worker keeps in memory between rounds."""

    def __init__(self, options: argparse.Namespace, _progress: Progress) -> None:
        import torch

        self.mean = torch.full((), float("nan"), dtype=torch.float64)
        self.text = corpus()
        self.model = build_model(options.seed, options.construction_seconds)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.model(self.text[None, :CONTEXT]).sum().backward()  # so that the first step has nothing left to create
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The state to save and to send to other workers."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "loss": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of another worker or of a checkpoint."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.mean = state["loss"]


def load(training: Training, memory: dict[str, Any], options: argparse.Namespace) -> int:
    """Start from the checkpoint, or from scratch if there is none. Returns the last finished step."""
    saved = Checkpoint(options.checkpoint_dir).load()
    with inprocess.uninterrupted():
        if saved is not None:
            training.load_state_dict(saved)
        memory["step"] = 0 if saved is None else saved["step"]
    return int(memory["step"])


def save(training: Training, step: int, options: argparse.Namespace) -> None:
    """Replace the checkpoint."""
    from rallypoint import notices

    with notices.saving():
        Checkpoint(options.checkpoint_dir).save({**training.state_dict(), "step": step})


@inprocess.resumable(prepare=Training)
def train(round_: inprocess.Round, options: argparse.Namespace, progress: Progress) -> None:
    """Train from the current state to the last step."""
    import torch
    import torch.distributed as dist
    import torch.distributed.nn.functional  # else DDP imports it later, and it keeps the group and gloo's threads alive
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    from rallypoint import notices

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if options.batch % world_size:
        raise SystemExit(f"--batch={options.batch} cannot be shared by {world_size} workers; choose a multiple")
    training: Training = round_.prepared
    first = round_.agree(training)
    if first is None:
        first = load(training, round_.memory, options)
    model, answered = DistributedDataParallel(training.model), 0
    progress.tell("training", step=first)
    if rank == 0:
        print(f"{world_size} workers, from step {first}", flush=True)
    for step in range(first + 1, options.steps + 1):
        sample = share(training.text, step, options.seed, options.batch, rank, world_size)
        loss = cross_entropy(model(sample[:, :-1]).flatten(0, 1), sample[:, 1:].flatten())
        training.optimizer.zero_grad()
        loss.backward()
        notice = notices.pending()
        told = notice is not None and notice.number > answered
        # Workers see a notice at different steps, but all must save in the same one: when any worker has seen it.
        sums = torch.stack([loss.detach() / world_size, torch.tensor(float(told), dtype=torch.float64)])
        dist.all_reduce(sums)
        with inprocess.uninterrupted():  # others might continue from this state: apply the whole step, or nothing
            training.optimizer.step()
            round_.memory["step"], training.mean = step, sums[0].clone()
        asked = bool(sums[1])
        if rank == 0:
            if asked or step % options.every == 0 or step == options.steps:
                saved = ", saved before a stop" if asked else ""
                print(f"step {step} loss {training.mean.item():.4f}{saved}", flush=True)
                save(training, step, options)
            progress.tell("step", step=step)
        if asked:
            dist.barrier()  # the checkpoint exists, so each worker can report it
            notices.acknowledge()
            answered = answered if notice is None else notice.number
    dist.barrier()
    if rank == 0:
        print(f"final loss {training.mean.item():.9f}", flush=True)
        progress.tell("done", loss=training.mean.item())
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(train))
