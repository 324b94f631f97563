"""Under DeepSpeed, rank 1 raises between two steps."""

import deepspeed  # type: ignore[import-not-found]
import torch

deepspeed.init_distributed("gloo")
model = torch.nn.Linear(4, 1)
config = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in range(4):
    if step == 2 and engine.global_rank == 1:
        raise ValueError("batch 2 has no labels")
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
