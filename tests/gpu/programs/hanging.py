"""A rank that never comes back: `hanging.py kernel|collective|missing DEVICE`.

kernel      waits for a kernel that runs for hours
collective  waits for a collective of NCCL that stands behind such a kernel on the device, so that it never begins
missing     the last rank stays away from a collective of NCCL; needs two GPUs
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from rallypoint import notices
from tests.gpu.programs.telling import tell

_CYCLES = 1 << 44
"""Hours, at 2 GHz."""


def spin(device: str) -> None:
    if device == "cuda":
        torch.cuda._sleep(_CYCLES)


def wait_for_device(device: str) -> None:
    tell("hanging")
    if device == "cuda":
        torch.cuda.synchronize()
    else:
        time.sleep(3600)


def main() -> None:
    kind, device = sys.argv[1:]
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    values = torch.ones(1024, device=device)
    dist.all_reduce(values)
    float(values[0])
    notices.progress(1)
    if kind == "missing" and dist.get_rank() == dist.get_world_size() - 1:
        tell("hanging")
        time.sleep(3600)
    if kind != "missing":
        spin(device)
    if kind != "kernel" and device == "cuda":
        dist.all_reduce(values)
    wait_for_device(device)


if __name__ == "__main__":
    main()
