"""A process that rank 1 spawns with torch.multiprocessing raises."""

import os
import time

import torch.multiprocessing


def shard(index: int) -> None:
    raise ValueError(f"shard {index} is empty")


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        torch.multiprocessing.spawn(shard, nprocs=1)
    time.sleep(60)
