"""Rank 1 runs out of device memory, in torch's words."""

import os
import time

import torch

if os.environ["RANK"] == "1":
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has 1.2 GiB free.")
time.sleep(60)
