"""The most common script: rank 1 raises, and exits through `finally: dist.destroy_process_group()`."""

import os
import time

import torch
import torch.distributed as dist


def train() -> None:
    dist.barrier()
    if os.environ["RANK"] == "1":
        raise ValueError("batch 7 has no labels")
    dist.all_reduce(torch.ones(4))


dist.init_process_group("gloo")
try:
    train()
finally:
    dist.destroy_process_group()
    time.sleep(2 if os.environ["RANK"] == "1" else 0.3)  # loggers, and other things that are closed
