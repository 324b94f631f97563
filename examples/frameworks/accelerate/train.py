r"""Hugging Face accelerate with a custom loop, `save_state` and `load_state`; saves before a stop.

rallyrun --standalone --nproc-per-node=2 --max-restarts=3 train.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed.nn.functional  # else DDP imports it later, and it keeps the group and gloo's threads alive
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from rallypoint import notices


def save(accelerator: Accelerator, folder: Path) -> None:
    """Save under another name, and rename when all ranks have written: a run never finds half a checkpoint."""
    draft = folder.with_name(f"draft-{folder.name}")
    with notices.saving():  # a stop waits for the end of this block
        accelerator.save_state(str(draft))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process and not folder.exists():
            draft.rename(folder)
        accelerator.wait_for_everyone()


def told_to_save(accelerator: Accelerator) -> bool:
    """Whether any worker has a notice of a stop. Workers see it at different steps, but must save in the same one."""
    told = torch.tensor(float(notices.pending() is not None), device=accelerator.device)
    return bool(accelerator.reduce(told, reduction="sum"))


def main() -> None:
    """Train from the last checkpoint, if there is one, to the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="total number of steps, including earlier runs")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"), help="folder shared by all nodes")
    options = parser.parse_args()

    # Without a GPU, accelerate must be told so; otherwise every worker trains on its own.
    cpu = not torch.accelerator.is_available()
    # The seed and the epoch determine the order of the samples, so a resumed run sees the same order.
    accelerator = Accelerator(cpu=cpu, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    set_seed(0)
    inputs = torch.randn(96, 8)
    samples = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples, batch_size=4, shuffle=True))

    step = 0
    saved = sorted(options.checkpoint_dir.glob("step-*"))
    if saved:
        accelerator.load_state(str(saved[-1]))
        step = int(saved[-1].name.removeprefix("step-"))
    accelerator.print(f"{accelerator.num_processes} workers, from step {step}\n", end="", flush=True)

    while step < options.steps:
        epoch, done = divmod(step, len(loader))
        loader.set_epoch(epoch)
        for features, wanted in accelerator.skip_first_batches(loader, done):
            loss = mse_loss(model(features), wanted)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            accelerator.print(f"step {step} loss of rank 0 {loss.item():.9f}\n", end="", flush=True)
            told = told_to_save(accelerator)
            if told or step % options.every == 0 or step == options.steps:
                save(accelerator, options.checkpoint_dir / f"step-{step:06d}")
            if told:
                notices.acknowledge()
            if step == options.steps:
                break
    model.eval()
    with torch.no_grad():
        error = mse_loss(model(inputs.to(accelerator.device)).cpu(), inputs.sum(1, keepdim=True))
    accelerator.print(f"final loss {error.item():.9f}\n", end="", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
