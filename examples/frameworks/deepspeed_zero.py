r"""DeepSpeed with ZeRO stage 1 on CPUs that resumes from its last checkpoint.

DS_ACCELERATOR=cpu rallyrun --standalone --nproc-per-node=2 --max-restarts=3 examples/frameworks/deepspeed_zero.py \
    --checkpoint-dir=checkpoints
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist


def main() -> None:
    """Train from the last checkpoint, if there is one, to the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint to the next")
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    options = parser.parse_args()

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs = torch.randn(16 * world_size, 8)[rank::world_size]
    batches = list(zip(inputs.split(4), inputs.sum(1, keepdim=True).split(4), strict=True))
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": 1},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
        },
    )
    if (options.checkpoint_dir / "latest").exists():
        engine.load_checkpoint(str(options.checkpoint_dir))
    while engine.global_steps < options.steps:
        features, wanted = batches[engine.global_steps % len(batches)]
        loss = torch.nn.functional.mse_loss(engine(features), wanted)
        engine.backward(loss)
        engine.step()
        if rank == 0:
            print(f"step {engine.global_steps}", flush=True)
        if engine.global_steps % options.every == 0:
            engine.save_checkpoint(str(options.checkpoint_dir))  # writes `latest` last
    weights = sum(parameter.double().abs().sum() for parameter in engine.module.parameters())
    if rank == 0:
        print(f"final loss {weights:.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
