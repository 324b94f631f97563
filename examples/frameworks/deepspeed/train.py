r"""DeepSpeed with ZeRO stage 1: resumes from its last checkpoint, and saves before a stop.

rallyrun --standalone --nproc-per-node=2 --max-restarts=3 train.py

Without a GPU, set DS_ACCELERATOR=cpu first. DeepSpeed then needs a C++ compiler for its first start.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.nn.functional import mse_loss

from rallypoint import notices

BATCH = 4


def save(engine: deepspeed.DeepSpeedEngine, folder: Path) -> None:
    """Save, then atomically name the new checkpoint in `latest`, which always names a complete one."""
    tag = f"global_step{engine.global_steps}"
    with notices.saving():  # a stop waits for the end of this block
        engine.save_checkpoint(str(folder), tag=tag, save_latest=False)
        dist.barrier()  # until every worker has written its part
        if dist.get_rank() == 0:
            draft = folder / "latest.draft"
            draft.write_text(tag)
            draft.replace(folder / "latest")


def told_to_save(device: str) -> bool:
    """Whether any worker has a notice of a stop. Workers see it at different steps, but must save in the same one."""
    told = torch.tensor(float(notices.pending() is not None), device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return bool(told)


def main() -> None:
    """Train from the last checkpoint, if there is one, to the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="total number of steps, including earlier runs")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"), help="folder shared by all nodes")
    options = parser.parse_args()

    deepspeed.init_distributed(verbose=False)
    device = get_accelerator().current_device_name()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs = torch.randn(4 * BATCH * world_size, 8)[rank::world_size].to(device)
    batches = list(zip(inputs.split(BATCH), inputs.sum(1, keepdim=True).split(BATCH), strict=True))
    layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    engine, *_ = deepspeed.initialize(
        model=layers,
        optimizer=torch.optim.AdamW(layers.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        },
    )
    if (options.checkpoint_dir / "latest").exists():
        engine.load_checkpoint(str(options.checkpoint_dir))
    if rank == 0:
        print(f"{world_size} workers, from step {engine.global_steps}\n", end="", flush=True)
    while engine.global_steps < options.steps:
        features, wanted = batches[engine.global_steps % len(batches)]
        loss = mse_loss(engine(features), wanted)
        engine.backward(loss)
        engine.step()
        if rank == 0:
            print(f"step {engine.global_steps} loss of rank 0 {loss.item():.9f}\n", end="", flush=True)
        told = told_to_save(device)
        if told or engine.global_steps % options.every == 0 or engine.global_steps == options.steps:
            save(engine, options.checkpoint_dir)
        if told:
            notices.acknowledge()
    error = mse_loss(engine(inputs), inputs.sum(1, keepdim=True)).detach()
    dist.all_reduce(error)
    if rank == 0:
        print(f"final loss {error.item() / world_size:.9f}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
