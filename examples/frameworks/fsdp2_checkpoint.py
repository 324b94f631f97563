r"""FSDP2 (`fully_shard`) with torch's distributed checkpoints, which any number of workers can load.

rallyrun --standalone --nproc-per-node=2 --max-restarts=3 examples/frameworks/fsdp2_checkpoint.py \
    --checkpoint-dir=checkpoints
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Train from the last checkpoint, if there is one, to the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint to the next")
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 48), torch.nn.ReLU(), torch.nn.Linear(48, 1))
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(16 * world_size, 8)[rank::world_size]

    first = load(model, optimizer, options.checkpoint_dir)
    for step in range(first + 1, options.steps + 1):
        features = inputs[4 * (step % 4) : 4 * (step % 4) + 4]
        loss = torch.nn.functional.mse_loss(model(features), features.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}", flush=True)
        if step % options.every == 0:
            save(model, optimizer, options.checkpoint_dir / f"step-{step:06d}")
    total = loss.detach()
    dist.all_reduce(total)
    if rank == 0:
        print(f"final loss {total.item():.9f}", flush=True)
    dist.destroy_process_group()


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is saved, each worker's shard of it."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write `folder`; its `.metadata` is written last, by rank 0, when all have written their shards."""
    dcp.save(state_of(model, optimizer), checkpoint_id=str(folder))


def load(model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Load the last whole checkpoint, if there is one; returns its step."""
    whole = sorted(path.parent for path in folder.glob("step-*/.metadata"))
    if not whole:
        return 0
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=str(whole[-1]))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(whole[-1].name.removeprefix("step-"))


if __name__ == "__main__":
    main()
