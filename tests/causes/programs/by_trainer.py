"""Under the Trainer of Hugging Face, rank 1 raises in a callback."""

import os

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments  # type: ignore[import-not-found]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).sum()}


class Check(TrainerCallback):
    def on_step_end(self, *_: object, **__: object) -> None:
        if os.environ["RANK"] == "1":
            raise ValueError("the loss is nan after the first step")


arguments = TrainingArguments("out", use_cpu=True, max_steps=4, report_to=[], disable_tqdm=True, save_strategy="no")
data = [{"x": torch.ones(4)}] * 64
Trainer(Model(), arguments, train_dataset=data, callbacks=[Check()]).train()
