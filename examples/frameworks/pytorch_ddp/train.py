r"""PyTorch's DistributedDataParallel: resumes from the last checkpoint, and saves before a stop.

rallyrun --standalone --nproc-per-node=2 --max-restarts=3 train.py
"""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # else DDP imports it later, and it keeps the group and gloo's threads alive
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from rallypoint import notices


def save(state: dict[str, object], path: Path) -> None:
    """Replace the file atomically: a crash leaves the old checkpoint or the new one, never half a checkpoint."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    with notices.saving():  # a stop waits for the end of this block
        torch.save(state, draft)
        draft.replace(path)


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
    rank = dist.get_rank()

    torch.manual_seed(0)
    inputs = torch.randn(96, 8)
    samples = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(samples)
    loader = DataLoader(samples, batch_size=4, sampler=sampler)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model = DistributedDataParallel(layers.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    step, loss = 0, torch.tensor(float("nan"), device=device)
    checkpoint = options.checkpoint_dir / "last.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, loss = saved["step"], saved["loss"]
    if rank == 0:
        print(f"{dist.get_world_size()} workers, from step {step}\n", end="", flush=True)

    while step < options.steps:
        epoch, done = divmod(step, len(loader))
        sampler.set_epoch(epoch)
        for features, wanted in itertools.islice(loader, done, None):
            error = mse_loss(model(features.to(device)), wanted.to(device))
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
            step += 1
            loss = error.detach() / dist.get_world_size()
            dist.all_reduce(loss)
            told = told_to_save(device)
            if rank == 0:
                print(f"step {step} loss {loss.item():.9f}\n", end="", flush=True)
                if told or step % options.every == 0 or step == options.steps:
                    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                    save({**state, "step": step, "loss": loss}, checkpoint)
            if told:
                dist.barrier()  # the checkpoint exists, so each worker can report it
                notices.acknowledge()
            if step == options.steps:
                break
    if rank == 0:
        print(f"final loss {loss.item():.9f}\n", end="", flush=True)
    dist.barrier()
    # Delete what refers to the group first, so that its threads end here and not during the interpreter's shutdown.
    del model, optimizer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
