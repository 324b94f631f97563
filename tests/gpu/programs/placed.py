"""Prints a worker's place: its ranks, its visible GPUs, and its processors."""

from __future__ import annotations

import os

import torch

from tests.gpu.programs.telling import tell


def main() -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    tell(
        "placed",
        local_rank=int(os.environ["LOCAL_RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        uuids=[f"GPU-{torch.cuda.get_device_properties(number).uuid}" for number in range(count)],
        cpus=sorted(os.sched_getaffinity(0)),
    )


if __name__ == "__main__":
    main()
