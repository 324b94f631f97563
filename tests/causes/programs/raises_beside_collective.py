"""Rank 1 raises, without any clean-up, while rank 0 is in a collective: chance decides who dies first."""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if os.environ["RANK"] == "1":
    raise ValueError("batch 7 has no labels")
dist.all_reduce(torch.ones(4))
