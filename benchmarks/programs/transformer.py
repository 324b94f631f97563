"""A small transformer as a job that is killed often: `benchmarks.ten_kills` runs it.

Loaders with processes of their own, a learning rate schedule, a checkpoint every 20 steps, `torch.compile` where there
is a compiler, and a construction that takes seconds. With `--resumable` it goes on in its process when others die;
without, it reads the checkpoint. The samples of a step depend on the step alone, so the loss of a step is the same
however often workers were killed before it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import nn
from torch.nn.functional import cross_entropy, gelu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from rallypoint import inprocess, notices

TOKENS, LENGTH, WIDTH, SAMPLES = 64, 32, 64, 8
EVERY = 20
"""Steps from one checkpoint to the next."""


def tell(event: str, **details: float) -> None:
    line = {"event": event, "rank": int(os.environ.get("RANK", "-1")), "pid": os.getpid(), **details}
    os.write(1, (json.dumps(line) + "\n").encode())


class Steps(Dataset[torch.Tensor]):
    """This worker's part of the samples of each step: sequences that count up by a number of their own."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._part = slice(rank, None, world_size)

    def __getitem__(self, step: int) -> torch.Tensor:
        chance = torch.Generator().manual_seed(step)
        first, by = (torch.randint(1, TOKENS, (SAMPLES, 1), generator=chance)[self._part] for _ in range(2))
        return (first + by * torch.arange(LENGTH + 1)) % TOKENS


class Mix(nn.Module):
    """What is compiled where there is a compiler: small, since two cores take minutes for the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.apart, self.together = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.together(gelu(self.apart(hidden)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.mix = Mix()
        self.guess = nn.Linear(WIDTH, TOKENS)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), -math.inf).triu(1).double(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.place.weight
        return self.guess(self.mix(self.layers(hidden, mask=self.mask, is_causal=True)))


class Training:
    """Model, optimizer and schedule, built once in each process."""

    def __init__(self, options: argparse.Namespace) -> None:
        time.sleep(options.construction_seconds)
        torch.manual_seed(0)
        self.model = Model().double()
        if shutil.which("c++") or shutil.which("g++"):
            self.model.mix.compile()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=2000)
        # A first pass, so that what is compiled or made with the first one is there.
        self.loss(self.model, torch.zeros(SAMPLES // 2, LENGTH + 1, dtype=torch.int64)).backward()
        self.optimizer.zero_grad()

    @staticmethod
    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "schedule")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, each in state.items():
            getattr(self, name).load_state_dict(each)


def load(training: Training, path: Path) -> int:
    """Read the checkpoint, if there is one; returns its step, or 0."""
    if not path.exists():
        return 0
    saved = torch.load(path, weights_only=True)
    training.load_state_dict(saved["state"])
    return int(saved["step"])


def train(round_: inprocess.Round, options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    rank, training, path = dist.get_rank(), round_.prepared, options.checkpoint_dir / "last.pt"
    last = round_.agree(training)
    if last is None:
        with inprocess.uninterrupted():
            last = round_.memory["step"] = load(training, path)
    model = DistributedDataParallel(training.model)
    steps = Steps(rank, dist.get_world_size())
    loader = DataLoader(steps, batch_size=None, sampler=range(last + 1, options.steps + 1), num_workers=2)
    tell("training", step=last)
    for step, tokens in enumerate(loader, last + 1):
        training.optimizer.zero_grad()
        loss = training.loss(model, tokens)
        loss.backward()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        with inprocess.uninterrupted():
            training.optimizer.step()
            training.schedule.step()
            round_.memory["step"] = step
        notices.progress(step)
        if rank == 0:
            if step % EVERY == 0:
                with notices.saving():
                    torch.save({"state": training.state_dict(), "step": step}, draft := path.with_suffix(".draft"))
                    draft.replace(path)
            tell("step", step=step, loss=mean.item())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    parser.add_argument("--construction-seconds", type=float, default=0.0)
    parser.add_argument("--resumable", action="store_true")
    parser.add_argument("--progress", help="unused: what happens is told on standard output")
    options = parser.parse_args()
    if options.resumable:
        inprocess.resumable(prepare=Training)(train)(options)
    else:
        train(inprocess.Round(False, {}, 0, Training(options)), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
