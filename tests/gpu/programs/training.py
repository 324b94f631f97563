"""A small transformer, trained with DDP and autocast; what a job on GPUs does, in seconds.

    --device          cuda or cpu; where workers outnumber the GPUs, they share them
    --backend         of the default group, for the gradients
    --own-nccl        each rank also has an NCCL group of itself, used in each step
    --compile         torch.compile
    --resumable       continues in its process when other workers die (`rallypoint.inprocess`)
    --prepare         where `prepare` puts the model: `host`, so that the CUDA context is made in the round, or `device`
    --fill            share of the device's free memory that is taken at the start, so that two workers have no room
    --die-at          step after which the last rank of the job's first start kills itself
    --save-on-sigterm SIGTERM makes all ranks save in the same step, and end
    --stop-after      step after which the job ends

Each step is told by rank 0 once the device has finished it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from rallypoint import inprocess, notices
from tests.gpu.programs.telling import tell

TOKENS, LENGTH, SAMPLES = 64, 64, 8
EVERY = 10
"""Steps from one checkpoint to the next."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--own-nccl", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--resumable", action="store_true")
    parser.add_argument("--prepare", choices=("host", "device"), default="device")
    parser.add_argument("--fill", type=float, default=0.0)
    parser.add_argument("--die-at", type=int, default=0)
    parser.add_argument("--save-on-sigterm", action="store_true")
    parser.add_argument("--stop-after", type=int, default=1_000_000)
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    return parser.parse_args()


def device_of(options: argparse.Namespace) -> torch.device:
    if options.device == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(TOKENS, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.guess = nn.Linear(width, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=tokens.device)
        hidden = self.layers(self.embed(tokens) + self.place.weight, mask=mask, is_causal=True)
        return self.guess(hidden)


class Training:
    """Model and optimizer, built once in each process."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.model = Model(256 if options.device == "cuda" else 32)
        if options.prepare == "device":
            self.place(device_of(options))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def place(self, device: torch.device) -> None:
        """Put the model on the device, where it may be already."""
        self.model.to(device)
        for state in self.optimizer.state.values() if hasattr(self, "optimizer") else ():
            state.update({name: value.to(device) for name, value in state.items() if name != "step"})

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def batch(step: int, rank: int, size: int, device: torch.device) -> torch.Tensor:
    """This worker's part of the sequences of a step: they count up, each by a number of its own."""
    chance = torch.Generator().manual_seed(step)
    first, by = (torch.randint(1, TOKENS, (SAMPLES, 1), generator=chance)[rank::size] for _ in range(2))
    return ((first + by * torch.arange(LENGTH + 1)) % TOKENS).to(device)


def resume(round_: inprocess.Round, training: Training, path: Path, device: torch.device) -> int:
    """Continue from the worker that is furthest, else from the checkpoint of rank 0; returns the last finished step.

    Nodes need not share a file system.
    """
    last = round_.agree(training)
    if last is None and dist.get_rank() == 0 and path.exists():
        saved = torch.load(path, weights_only=True, map_location=device)
        with inprocess.uninterrupted():
            training.load_state_dict(saved["state"])
            round_.memory["step"] = int(saved["step"])
    if last is None:
        last = round_.agree(training)
    return round_.memory.setdefault("step", 0) if last is None else last


def save(training: Training, step: int, path: Path) -> None:
    with notices.saving():
        torch.save({"state": training.state_dict(), "step": step}, draft := path.with_suffix(".draft"))
        draft.replace(path)


def own_group(options: argparse.Namespace) -> Any:
    """An NCCL group of this rank alone; None if not asked for."""
    if not options.own_nccl:
        return None
    groups = [dist.new_group([rank], backend="nccl") for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def take_memory(options: argparse.Namespace, device: torch.device) -> torch.Tensor | None:
    """Tell how much memory of the device is free, and take a share of it."""
    if device.type == "cpu":
        tell("memory", free=0)
        return None
    torch.cuda.set_device(device)
    free, _ = torch.cuda.mem_get_info(device)
    tell("memory", free=free)
    return torch.empty(int(free * options.fill), dtype=torch.uint8, device=device)


def train(round_: inprocess.Round, options: argparse.Namespace) -> None:
    stop: list[bool] = []
    if options.save_on_sigterm:
        signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    device = device_of(options)
    taken = take_memory(options, device)
    dist.init_process_group(options.backend)
    own = own_group(options)
    rank, size, path = dist.get_rank(), dist.get_world_size(), options.checkpoint_dir / "last.pt"
    training: Training = round_.prepared
    training.place(device)
    last = resume(round_, training, path, device)
    model: Any = DistributedDataParallel(training.model)
    if options.compile:
        model = torch.compile(model)
    tell("training", step=last, survived=round_.survived, device=str(device))
    for step in range(last + 1, options.stop_after + 1):
        tokens = batch(step, rank, size, device)
        training.optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            guessed = model(tokens[:, :-1])
        loss = cross_entropy(guessed.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        sums = torch.stack([loss.detach() / size, torch.tensor(float(bool(stop)), device=device)])
        dist.all_reduce(sums)
        if own is not None:
            dist.all_reduce(sums.clone(), group=own)
        with inprocess.uninterrupted():
            training.optimizer.step()
            round_.memory["step"] = step
        mean, asked = sums[0].item(), bool(sums[1].item())  # `item` waits for the device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        notices.progress(step)
        if rank == 0:
            if asked or step % EVERY == 0:
                save(training, step, path)
            tell("step", step=step, loss=mean)
        if asked:
            dist.barrier()
            break
        if step == options.die_at and rank == size - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    del model, taken
    dist.destroy_process_group()
    tell("done")


def main() -> int:
    options = arguments()
    if options.resumable:
        inprocess.resumable(prepare=Training)(train)(options)
    else:
        train(inprocess.Round(False, {}, 0, Training(options)), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
