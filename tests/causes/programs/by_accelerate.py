"""Under accelerate, rank 1 raises in its training loop."""

import torch
from accelerate import Accelerator  # type: ignore[import-not-found]

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(4):
    if step == 2 and accelerator.process_index == 1:
        raise ValueError("batch 2 has no labels")
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
