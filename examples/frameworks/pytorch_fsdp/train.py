r"""PyTorch's FSDP (`fully_shard`), with distributed checkpoints that any number of workers can load.

rallyrun --standalone --nproc-per-node=2 --max-restarts=3 train.py
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

from rallypoint import notices


class Training:
    """The model and its optimizer; each worker has its own shard of both."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 48), torch.nn.ReLU(), torch.nn.Linear(48, 1)).to(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in self.model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def state(self) -> dict[str, Any]:
        """The state to save."""
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments}

    def save(self, folder: Path) -> None:
        """Write the folder. `.metadata` is written last, after all workers' parts, and marks the folder as complete."""
        with notices.saving():  # a stop waits for the end of this block
            dcp.save(self.state(), checkpoint_id=folder)

    def load(self, folder: Path) -> int:
        """Load the last complete checkpoint in `folder`, if any, and return its step."""
        whole = sorted(path.parent for path in folder.glob("step-*/.metadata"))
        if not whole:
            return 0
        state = self.state()
        dcp.load(state, checkpoint_id=whole[-1])
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return int(whole[-1].name.removeprefix("step-"))


def told_to_save(device: torch.device) -> bool:
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

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    training = Training(device)
    first = training.load(options.checkpoint_dir)
    if rank == 0:
        print(f"{world_size} workers, from step {first}\n", end="", flush=True)

    inputs = torch.randn(96, 8)[rank::world_size].to(device)
    for step in range(first + 1, options.steps + 1):
        features = inputs.roll(-4 * step, 0)[:4]
        loss = mse_loss(training.model(features), features.sum(1, keepdim=True))
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss of rank 0 {loss.item():.9f}\n", end="", flush=True)
        told = told_to_save(device)
        if told or step % options.every == 0 or step == options.steps:
            training.save(options.checkpoint_dir / f"step-{step:06d}")
        if told:
            notices.acknowledge()
    error = mse_loss(training.model(inputs), inputs.sum(1, keepdim=True)).detach()
    dist.all_reduce(error)
    if rank == 0:
        print(f"final loss {error.item() / world_size:.9f}\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
