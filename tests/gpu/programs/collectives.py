"""A process group over the job's store: all_reduce, barrier and a broadcast between all ranks, on their own devices."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

from tests.gpu.programs.telling import tell

FLOATS = 1 << 24
_TURNS = 20


def main() -> None:
    backend = sys.argv[1]
    if on_gpu := backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    device = "cuda" if on_gpu else "cpu"
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    values = torch.full((FLOATS,), float(rank + 1), device=device)
    dist.all_reduce(values)
    right = bool((values == size * (size + 1) / 2).all())
    dist.barrier()
    told = torch.tensor([rank * 7.0], device=device)
    dist.broadcast(told, size - 1)
    right = right and told.item() == (size - 1) * 7.0
    began = time.monotonic()
    for _ in range(_TURNS):
        dist.all_reduce(values)
    float(values[0])  # waits for the device
    seconds = (time.monotonic() - began) / _TURNS
    # Of the algorithm, as nccl-tests count it: bytes of the tensor by seconds.
    speed = values.numel() * values.element_size() / seconds / 1e9
    store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    dist.barrier()
    dist.destroy_process_group()
    tell("collectives", right=right, world_size=size, backend=backend, gigabytes_a_second=round(speed, 1), store=store)


if __name__ == "__main__":
    main()
