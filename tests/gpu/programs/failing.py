"""A program's mistakes on a GPU, each of which CUDA reports in its own way: `failing.py assert|address|memory`."""

from __future__ import annotations

import sys

import torch

from tests.gpu.programs.telling import tell


def fail_assertion() -> None:
    """An index outside of the tensor: a kernel of torch asserts that there is none."""
    values = torch.zeros(4, device="cuda")
    values[torch.tensor([9], device="cuda")] += 1.0
    torch.cuda.synchronize()


def write_to_bad_address() -> None:
    """A kernel of the program's own that writes far outside of its tensor."""
    from tests.gpu.programs.wild_kernel import write_far_away

    write_far_away(torch.zeros(4, device="cuda"))
    torch.cuda.synchronize()


def exhaust_memory() -> None:
    kept = [torch.empty(1 << 34, dtype=torch.uint8, device="cuda") for _ in range(1024)]
    tell("memory", kept=len(kept))


KINDS = {"assert": fail_assertion, "address": write_to_bad_address, "memory": exhaust_memory}

if __name__ == "__main__":
    KINDS[sys.argv[1]]()
