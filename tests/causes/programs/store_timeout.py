"""Rank 0 waits for a key that rank 1 does not set, since it is busy in its own code: the store's timeout passes."""

import datetime
import os
import time

import torch.distributed as dist


def tokenize() -> None:
    time.sleep(600)


dist.init_process_group("gloo")
dist.barrier()
if os.environ["RANK"] == "1":
    tokenize()
dist.distributed_c10d._get_default_store().wait(["tokens"], datetime.timedelta(seconds=3))
