"""The program that other people's launchers run (`test_launchers.py`): two ranks train a small model on random data.

    training.py plain|accelerate|fabric FOLDER

Each rank writes its process id into the folder. Rank 0 reports each step through a pipe there that holds one message,
so the rank is never more than two steps ahead of the reader.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def stamp(folder: str) -> None:
    """Write down that a worker has begun."""
    with Path(folder, "started").open("a") as file:
        file.write(f"{time.monotonic()}\n")


if __name__ == "__main__":
    stamp(sys.argv[2])  # before torch is imported, which takes seconds

import torch  # noqa: E402

STEPS, EVERY = 60, 20
SIZE = 4096
"""Bytes of a message: all that the pipe is told to hold."""


def prepared(kind: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, torch.nn.Module]:
    """The rank, and the model in the hands of a framework."""
    if kind == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        return accelerator.process_index, accelerator.prepare_model(model)
    if kind == "fabric":
        from lightning_fabric import Fabric

        fabric = Fabric()  # `fabric run` has launched it
        fabric_model, _ = fabric.setup(model, optimizer)
        return fabric.global_rank, fabric_model
    torch.distributed.init_process_group("gloo")
    return torch.distributed.get_rank(), torch.nn.parallel.DistributedDataParallel(model)


def train(kind: str, folder: str) -> None:
    """Train from the last checkpoint, if there is one."""
    stamp(folder)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    inputs = torch.randn(2 * STEPS, 16, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    saved, step = Path(folder, "saved.pt"), 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        step = state["step"]
    rank, wrapped = prepared(kind, model, optimizer)
    Path(folder, f"rank-{rank}").write_text(f"{os.getpid()}")
    told = os.open(Path(folder, "steps"), os.O_WRONLY) if rank == 0 else -1

    def tell(text: str) -> None:
        if rank == 0:
            os.write(told, f"{text}\n".ljust(SIZE).encode())

    tell(f"begin {step}")
    loss = torch.tensor(0.0)
    while step < STEPS:
        batch = inputs[2 * step + rank]
        loss = torch.nn.functional.mse_loss(wrapped(batch), batch.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0 and step % EVERY == 0:
            torch.save({"model": model.state_dict(), "step": step}, draft := saved.with_suffix(".new"))
            draft.replace(saved)
        tell(f"step {step}")
    weights = sum(float(each.detach().double().sum()) for each in model.parameters())
    tell(f"final {float(loss.detach()):.9f} {weights:.9f}")
    torch.distributed.barrier()
    del wrapped  # what holds the group goes first: else torch can wait forever for gloo's thread
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    train(*sys.argv[1:3])
