r"""A Lightning module that resumes from its last checkpoint, where an epoch begins; an epoch is one batch a worker.

rallyrun --standalone --nproc-per-node=2 --max-restarts=3 examples/frameworks/lightning_fit.py \
    --checkpoint-dir=checkpoints
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

BATCH = 4


class Regression(lightning.LightningModule):
    """A small regression that prints each step, on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        """See `LightningModule`."""
        features, wanted = batch
        return torch.nn.functional.mse_loss(self.layers(features), wanted)

    def on_train_batch_end(self, *_: Any) -> None:
        """See `LightningModule`."""
        if self.global_rank == 0:
            print(f"step {self.global_step}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """See `LightningModule`."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Train from the last checkpoint, if there is one, to the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint to the next")
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    options = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    world_size, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    inputs = torch.randn(BATCH * world_size, 8)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=BATCH)
    model = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=local,
        num_nodes=world_size // local,
        max_steps=options.steps,
        callbacks=[ModelCheckpoint(options.checkpoint_dir, save_last=True, every_n_epochs=options.every)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = options.checkpoint_dir / "last.ckpt"
    trainer.fit(model, data, ckpt_path=str(last) if last.exists() else None, weights_only=False)
    weights = sum(parameter.double().abs().sum() for parameter in model.parameters())
    if trainer.is_global_zero:
        print(f"final loss {weights:.9f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
