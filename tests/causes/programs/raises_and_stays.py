"""Rank 1 raises but does not end, since one of its threads runs on; the collective of rank 0 times out."""

import datetime
import os
import threading
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=6))
dist.barrier()
if os.environ["RANK"] == "1":
    threading.Thread(target=time.sleep, args=(600,), name="prefetcher").start()
    raise ValueError("batch 7 has no labels")
dist.all_reduce(torch.ones(4))
