r"""An engine of PyTorch Ignite over DDP that resumes from its last checkpoint.

rallyrun --standalone --nproc-per-node=2 --max-restarts=3 examples/frameworks/ignite_engine.py \
    --checkpoint-dir=checkpoints
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver

Batch = tuple[torch.Tensor, torch.Tensor]


def training(_index: int, options: argparse.Namespace) -> None:
    """What each worker does."""
    torch.manual_seed(0)
    rank, world_size = idist.get_rank(), idist.get_world_size()
    inputs = torch.randn(16 * world_size, 8)[rank::world_size]
    batches = list(zip(inputs.split(4), inputs.sum(1, keepdim=True).split(4), strict=True))
    model = idist.auto_model(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)))
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def update(_engine: Engine, batch: Batch) -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return float(loss)

    trainer = Engine(update)
    state = {"model": model, "optimizer": optimizer, "trainer": trainer}
    saver = DiskSaver(str(options.checkpoint_dir), require_empty=False)
    checkpoint = Checkpoint(state, saver, n_saved=2, global_step_transform=lambda engine, _: engine.state.epoch)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, checkpoint)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda engine: rank == 0 and print(f"step {engine.state.iteration}", flush=True),
    )
    saved = sorted(options.checkpoint_dir.glob("*.pt"), key=lambda path: int(path.stem.rpartition("_")[2]))
    if saved:
        Checkpoint.load_objects(state, torch.load(saved[-1], weights_only=False))
    trainer.run(batches, max_epochs=options.steps // len(batches))
    loss = torch.tensor(trainer.state.output or 0.0)
    total = idist.all_reduce(loss)
    if rank == 0:
        print(f"final loss {float(total):.9f}", flush=True)


def main() -> None:
    """Train from the last checkpoint, if there is one, to the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(training, parser.parse_args())


if __name__ == "__main__":
    main()
