r"""PyTorch Ignite with DDP: saves after each epoch, and resumes from its last checkpoint.

rallyrun --standalone --nproc-per-node=2 --max-restarts=3 train.py
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from torch.nn.functional import mse_loss

BATCH = 4

Batch = tuple[torch.Tensor, torch.Tensor]


def training(_index: int, options: argparse.Namespace) -> None:
    """What each worker does."""
    torch.manual_seed(0)
    rank, world_size = idist.get_rank(), idist.get_world_size()
    inputs = torch.randn(options.every * BATCH * world_size, 8)[rank::world_size].to(idist.device())
    batches = list(zip(inputs.split(BATCH), inputs.sum(1, keepdim=True).split(BATCH), strict=True))
    model = idist.auto_model(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)))
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=1e-3))

    def update(_engine: Engine, batch: Batch) -> float:
        optimizer.zero_grad()
        loss = mse_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(update)
    state = {"model": model, "optimizer": optimizer, "trainer": trainer}
    saver = DiskSaver(str(options.checkpoint_dir), require_empty=False)  # writes a temporary file, then renames it
    checkpoint = Checkpoint(state, saver, n_saved=2, global_step_transform=lambda engine, _: engine.state.iteration)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, checkpoint)

    @trainer.on(Events.ITERATION_COMPLETED)
    def _tell(engine: Engine) -> None:
        if rank == 0:
            print(f"step {engine.state.iteration} loss of rank 0 {engine.state.output:.9f}\n", end="", flush=True)

    saved = sorted(options.checkpoint_dir.glob("*.pt"), key=lambda path: int(path.stem.rpartition("_")[2]))
    if saved:
        Checkpoint.load_objects(state, torch.load(saved[-1], map_location=idist.device(), weights_only=False))
    if rank == 0:
        print(f"{world_size} workers, from step {trainer.state.iteration}\n", end="", flush=True)
    if trainer.state.iteration < options.steps:  # an engine that finished all its epochs would start again
        trainer.run(batches, max_epochs=options.steps // len(batches))
    loss = mse_loss(model(inputs), inputs.sum(1, keepdim=True)).detach()
    total = idist.all_reduce(loss)
    if rank == 0:
        print(f"final loss {float(total) / world_size:.9f}\n", end="", flush=True)


def main() -> None:
    """Train from the last checkpoint, if there is one, to the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="total number of steps, including earlier runs")
    parser.add_argument("--every", type=int, default=20, help="steps per epoch, each of which ends with a checkpoint")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"), help="folder shared by all nodes")
    with idist.Parallel(backend="nccl" if torch.cuda.is_available() else "gloo") as parallel:
        parallel.run(training, parser.parse_args())
    # The engine and its handlers refer to each other and to the model, which keeps the process group alive. Collect
    # them here, so that the group's threads do not end during the interpreter's shutdown.
    gc.collect()


if __name__ == "__main__":
    main()
