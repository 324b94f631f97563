"""A backward pass of DistributedDataParallel: the last rank raises in its loss, the others are in a reduction."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
for step in range(4):
    loss = model(torch.ones(2, 8)).sum()
    if step == 2 and int(os.environ["RANK"]) == dist.get_world_size() - 1:
        raise ValueError("the loss of step 2 is nan")
    loss.backward()
