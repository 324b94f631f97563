"""As train_ddp.py, but workers that live go on in their processes when others die, with the model that they have.

    rallyrun --standalone --nproc-per-node=2 --max-restarts=3 examples/train_ddp_inprocess.py

When a round ends, `train` is interrupted, and called again in the next one. Then some workers have finished a step that
others have not, and those that are new have nothing, nor have survivors that were interrupted before they had a state:
all receive the state of the one that is furthest. The checkpoint is read, and a large model loaded, only where nobody
has a state.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rallypoint import inprocess

if TYPE_CHECKING:
    import argparse

    from examples.train_ddp import Checkpoint, Progress, build_model, corpus, main, share
else:
    from train_ddp import Checkpoint, Progress, build_model, corpus, main, share

NOTHING = -1
"""The step of a worker that has no model yet."""


class Training:
    """What a worker has in memory, from one round to the next."""

    def __init__(self) -> None:
        import torch

        self.step = NOTHING
        self.mean = torch.full((), float("nan"), dtype=torch.float64)
        self.text = corpus()
        self.model = build_model(seed=0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def state(self) -> dict[str, Any]:
        """As it is saved and sent."""
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        return {"model": model, "optimizer": optimizer, "step": self.step, "loss": self.mean}

    def load(self, state: dict[str, Any]) -> None:
        """Have the state of another worker, or of a checkpoint."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.mean = state["step"], state["loss"]

    def start(self, options: argparse.Namespace) -> None:
        """Nobody has a state: begin with the checkpoint, or anew."""
        new = build_model(options.seed, options.construction_seconds).state_dict()
        saved = Checkpoint(options.checkpoint_dir).load()
        with inprocess.uninterrupted():
            if saved is not None:
                self.load(saved)
            else:
                self.model.load_state_dict(new)
                self.step = 0


def agree(training: Training, options: argparse.Namespace) -> None:
    """Have all workers go on from the state of the one that is furthest."""
    import torch
    import torch.distributed as dist

    steps = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(steps, torch.tensor(training.step))
    furthest = max(steps)
    if furthest == NOTHING:
        training.start(options)
    elif min(steps) < furthest:
        source = steps.index(furthest)
        sent: list[Any] = [training.state() if dist.get_rank() == source else None]
        dist.broadcast_object_list(sent, source)
        if training.step < furthest:
            with inprocess.uninterrupted():
                training.load(sent[0])


def save(training: Training, options: argparse.Namespace) -> None:
    """Replace the checkpoint."""
    from rallypoint import notices

    with notices.saving():
        Checkpoint(options.checkpoint_dir).save(training.state())


@inprocess.resumable
def train(round_: inprocess.Round, options: argparse.Namespace, progress: Progress) -> None:
    """Train from where the workers are to the last step."""
    import torch
    import torch.distributed as dist
    import torch.distributed.nn.functional  # else DDP imports it later, and it keeps the group, and gloo's threads
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    from rallypoint import notices

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if options.batch % world_size:
        raise SystemExit(f"--batch={options.batch} cannot be shared by {world_size} workers; choose a multiple")
    if "training" not in round_.memory:
        round_.memory["training"] = Training()
    training: Training = round_.memory["training"]
    agree(training, options)
    model, answered = DistributedDataParallel(training.model), 0
    progress.tell("training", step=training.step)
    if rank == 0:
        print(f"{world_size} workers, from step {training.step}", flush=True)
    for step in range(training.step + 1, options.steps + 1):
        sample = share(training.text, step, options.seed, options.batch, rank, world_size)
        loss = cross_entropy(model(sample[:, :-1]).flatten(0, 1), sample[:, 1:].flatten())
        training.optimizer.zero_grad()
        loss.backward()
        notice = notices.pending()
        told = notice is not None and notice.number > answered
        # Workers see a notice at different steps, and all have to save in the same one: in that in which any has.
        sums = torch.stack([loss.detach() / world_size, torch.tensor(float(told), dtype=torch.float64)])
        dist.all_reduce(sums)
        with inprocess.uninterrupted():  # what others may go on from: all of the step, or nothing
            training.optimizer.step()
            training.step, training.mean = step, sums[0].clone()
        asked = bool(sums[1])
        if rank == 0:
            if asked or step % options.every == 0 or step == options.steps:
                saved = ", saved before a stop" if asked else ""
                print(f"step {step} loss {training.mean.item():.4f}{saved}", flush=True)
                save(training, options)
            progress.tell("step", step=step)
        if asked:
            dist.barrier()  # the checkpoint is there: who says so now says it for itself
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
