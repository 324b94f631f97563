"""Rank 1 is killed while rank 0 is in a collective."""

import os
import signal

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(4))
