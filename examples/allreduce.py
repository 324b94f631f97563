"""Add up the ranks of all workers, each plus one. A worker that gets a wrong sum exits with 1.

rallyrun --standalone --nproc-per-node=2 examples/allreduce.py
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist


def main() -> int:
    """Reduce, meet at a barrier, and tell."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    dist.barrier()
    expected = world_size * (world_size + 1) // 2
    right = int(total) == expected
    verdict = "" if right else f", but {expected} is right"
    sys.stdout.write(f"rank {rank} of {world_size}: sum {int(total)}{verdict}\n")  # one write: lines stay complete
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
