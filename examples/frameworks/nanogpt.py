r"""A small GPT in the manner of nanoGPT, with DDP, that resumes from its last checkpoint.

rallyrun --standalone --nproc-per-node=2 --max-restarts=3 examples/frameworks/nanogpt.py \
    --checkpoint-dir=checkpoints
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

CONTEXT, WIDTH, HEADS, LAYERS, VOCABULARY = 32, 48, 4, 2, 128


class Block(nn.Module):
    """Attention to what came before, then two layers, each added to what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.project, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, context, width) in and out."""
        parts = self.project(self.norms[0](x)).split(WIDTH, dim=2)
        query, key, value = (each.unflatten(2, (HEADS, -1)).transpose(1, 2) for each in parts)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).flatten(2))
        return x + self.layers(self.norms[1](x))


class GPT(nn.Module):
    """Guesses the next character at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.guess = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Shape (batch, context) in, (batch, context, vocabulary) out."""
        return self.guess(self.blocks(self.characters(text) + self.places(torch.arange(CONTEXT))))


def save(state: dict[str, object], path: Path) -> None:
    """Replace the file in one step: a crash leaves the old one or the new one, and never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    torch.save(state, draft)
    draft.replace(path)


def main() -> None:
    """Train from the last checkpoint, if there is one, to the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint to the next")
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    text = torch.tensor([min(code, VOCABULARY - 1) for code in Path(os.__file__).read_bytes()])
    torch.manual_seed(0)
    model = DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoint = options.checkpoint_dir / "last.pt"
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    for step in range(first + 1, options.steps + 1):
        draw = torch.Generator().manual_seed(step * 1000 + rank)
        starts = torch.randint(len(text) - CONTEXT - 1, (8,), generator=draw)
        window = text[starts[:, None] + torch.arange(CONTEXT + 1)]
        loss = functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step}", flush=True)
            if step % options.every == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                save(state, checkpoint)
    total = loss.detach()
    dist.all_reduce(total)
    if rank == 0:
        print(f"final loss {total.item():.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
