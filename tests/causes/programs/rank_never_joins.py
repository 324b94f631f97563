"""Rank 1 does not come to `init_process_group`: it downloads something first, and rank 0's timeout passes."""

import datetime
import os
import time

import torch.distributed as dist


def download_the_weights() -> None:
    time.sleep(600)


if os.environ["RANK"] == "1":
    download_the_weights()
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
