"""Compiled code of rank 1 fails: shapes that do not fit."""

import os
import time

import torch


@torch.compile(backend="eager")
def forward(batch: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return batch @ weight


if os.environ["RANK"] == "1":
    forward(torch.ones(4, 8), torch.ones(9, 2))
time.sleep(60)
