r"""A training loop with Hugging Face accelerate that resumes from its last checkpoint.

rallyrun --standalone --nproc-per-node=2 --max-restarts=3 examples/frameworks/accelerate_loop.py \
    --checkpoint-dir=checkpoints
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH = 96, 4


def main() -> None:
    """Train from the last checkpoint, if there is one, to the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint to the next")
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    options = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    set_seed(0)
    inputs = torch.randn(SAMPLES, 8)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=BATCH)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), data)

    step = 0
    saved = sorted(options.checkpoint_dir.glob("step-*"))
    if saved:
        accelerator.load_state(str(saved[-1]))
        step = int(saved[-1].name.removeprefix("step-"))
    while step < options.steps:
        for features, wanted in accelerator.skip_first_batches(data, step % len(data)):
            loss = torch.nn.functional.mse_loss(model(features), wanted)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            accelerator.print(f"step {step}", flush=True)
            if step % options.every == 0:
                save(accelerator, options.checkpoint_dir / f"step-{step:06d}")
            if step == options.steps:
                break
    mean = accelerator.reduce(loss.detach(), reduction="mean")
    accelerator.print(f"final loss {mean.item():.9f}", flush=True)
    accelerator.end_training()


def save(accelerator: Accelerator, folder: Path) -> None:
    """Save under another name and rename when all ranks have written, so that no half of a checkpoint is ever found."""
    draft = folder.with_name(f"draft-{folder.name}")
    accelerator.save_state(str(draft))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process and not folder.exists():
        draft.rename(folder)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
