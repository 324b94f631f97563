"""Rank 1 is stuck at a lock, and rank 0 waits for it in a collective, for half an hour."""

import os
import threading

import torch
import torch.distributed as dist


def update_cache() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


dist.init_process_group("gloo")
dist.barrier()
if os.environ["RANK"] == "1":
    update_cache()
dist.all_reduce(torch.ones(4))
