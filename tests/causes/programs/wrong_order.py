"""Rank 1 is at a different collective than rank 0."""

import datetime
import os

import torch
import torch.distributed as dist


def validate(batch: torch.Tensor) -> None:
    dist.broadcast(batch, src=0)


dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
dist.barrier()
if os.environ["RANK"] == "1":
    validate(torch.ones(4))
dist.all_reduce(torch.ones(8))
dist.barrier()
