"""Rank 1 is slow in its own code; the collective of rank 0, which waits for it, times out."""

import datetime
import os
import time

import torch
import torch.distributed as dist


def read_the_slow_bucket() -> None:
    time.sleep(600)


dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
dist.barrier()
if os.environ["RANK"] == "1":
    read_the_slow_bucket()
dist.all_reduce(torch.ones(4))
