r"""A small GPT, trained like nanoGPT: settings at the top, DDP, one checkpoint, and no code specific to Rallypoint.

rallyrun --standalone --nproc-per-node=2 --max-restarts=3 train.py
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # else DDP imports it later, and it keeps the group and gloo's threads alive
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class GPTConfig:
    """The size of the model."""

    block_size: int = 32
    vocab_size: int = 128
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 48


class Block(nn.Module):
    """Causal attention, then two layers, each added to its input."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        n = config.n_embd
        self.heads = config.n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(n), nn.LayerNorm(n)
        self.c_attn, self.c_proj = nn.Linear(n, 3 * n), nn.Linear(n, n)
        self.mlp = nn.Sequential(nn.Linear(n, 4 * n), nn.GELU(), nn.Linear(4 * n, n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, block, embedding) in and out."""
        parts = self.c_attn(self.ln_1(x)).chunk(3, dim=2)
        q, k, v = (each.unflatten(2, (self.heads, -1)).transpose(1, 2) for each in parts)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Predicts the next character at each position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.Sequential(*(Block(config) for _ in range(config.n_layer)))
        self.ln_f, self.lm_head = nn.LayerNorm(config.n_embd), nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of a batch. Both arguments have the shape (batch, block)."""
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        return functional.cross_entropy(self.lm_head(self.ln_f(self.h(x))).flatten(0, 1), targets.flatten())


def main() -> None:
    """Train from the last checkpoint, if there is one, to the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="total number of steps, including earlier runs")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"), help="folder shared by all nodes")
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, device = dist.get_rank(), f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu"
    config = GPTConfig()
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).clamp(max=127).long()
    torch.manual_seed(1337)
    model = DistributedDataParallel(GPT(config).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    path, first = options.checkpoint_dir / "ckpt.pt", 0
    if path.exists():
        saved = torch.load(path, map_location=device, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["iter_num"]
    if rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        print(f"{dist.get_world_size()} workers, from step {first}\n", end="", flush=True)
    for step in range(first + 1, options.steps + 1):
        draw = torch.Generator().manual_seed(1000 * step + rank)  # seeded by step, so a resumed run draws the same
        starts = torch.randint(len(text) - config.block_size - 1, (8,), generator=draw)
        window = text[starts[:, None] + torch.arange(config.block_size + 1)].to(device)
        loss = model(window[:, :-1], window[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss of rank 0 {loss.item():.9f}\n", end="", flush=True)
            if step % options.every == 0 or step == options.steps:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": step}
                torch.save({**state, "config": asdict(config)}, path.with_suffix(".draft"))
                path.with_suffix(".draft").replace(path)  # atomic: never half a checkpoint
    window = text[: 64 * (config.block_size + 1)].unflatten(0, (64, -1)).to(device)
    final = model.module(window[:, :-1], window[:, 1:])
    if rank == 0:
        print(f"final loss {final.item():.9f}\n", end="", flush=True)
    dist.barrier()
    # Delete what refers to the group first, so that its threads end here and not during the interpreter's shutdown.
    del model, optimizer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
