"""Under Lightning, rank 1 raises in its training step."""

import lightning  # type: ignore[import-not-found]
import torch
from torch.utils.data import DataLoader


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        if index == 2 and self.global_rank == 1:
            raise ValueError("batch 2 has no labels")
        return torch.Tensor.sum(self.layer(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False)
trainer.fit(Model(), DataLoader(torch.ones(32, 4), batch_size=2))
