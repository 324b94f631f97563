r"""Lightning: resumes from its last checkpoint at the start of an epoch, and saves before a stop.

rallyrun --standalone --nproc-per-node=2 --max-restarts=3 train.py
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from rallypoint import notices

BATCH = 4


class Regression(lightning.LightningModule):
    """A small regression."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        """See `LightningModule`."""
        return mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """See `LightningModule`."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class SaveBeforeStop(Callback):
    """Saves after the epoch in which any worker gets a notice of a stop: the same one on all workers."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: lightning.Trainer, _module: lightning.LightningModule) -> None:
        """See `Callback`."""
        if trainer.is_global_zero:
            print(f"{trainer.world_size} workers, from step {trainer.global_step}\n", end="", flush=True)

    def on_train_epoch_end(self, trainer: lightning.Trainer, _module: lightning.LightningModule) -> None:
        """See `Callback`."""
        if trainer.is_global_zero:
            print(f"step {trainer.global_step} of {trainer.max_steps}\n", end="", flush=True)
        if trainer.strategy.reduce_boolean_decision(notices.pending() is not None, all=False):
            with notices.saving():  # a stop waits for the end of this block
                trainer.save_checkpoint(self.path)
            notices.acknowledge()


def main() -> None:
    """Train from the last checkpoint, if there is one, to the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="total number of steps, including earlier runs")
    parser.add_argument("--every", type=int, default=20, help="epochs (of one step) between checkpoints")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"), help="folder shared by all nodes")
    options = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    world_size, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    inputs = torch.randn(BATCH * world_size, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=BATCH)
    model = Regression()
    last = options.checkpoint_dir / "last.ckpt"
    periodic = ModelCheckpoint(
        options.checkpoint_dir, save_last=True, every_n_epochs=options.every, enable_version_counter=False
    )
    trainer = lightning.Trainer(
        strategy="ddp",
        devices=local,
        num_nodes=world_size // local,
        max_steps=options.steps,
        callbacks=[periodic, SaveBeforeStop(last)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader, ckpt_path=last if last.exists() else None, weights_only=False)
    with torch.no_grad():
        loss = mse_loss(model.cpu().layers(inputs), inputs.sum(1, keepdim=True))
    if trainer.is_global_zero:
        print(f"final loss {loss.item():.9f}\n", end="", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
