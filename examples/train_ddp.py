"""Train a small character model on the source of Python's standard library, with torch DDP on CPUs.

    rallyrun --standalone --nproc-per-node=2 --max-restarts=3 examples/train_ddp.py --checkpoint-dir=checkpoints

It shows how to write a job that survives failures:

- It resumes from the last checkpoint. A checkpoint is replaced atomically, so a crash leaves the old or the new one,
  never half a checkpoint.
- It saves when it gets a notice that it will be stopped (`rallypoint.notices`), in a step that all workers agree on.
- The batch depends only on the step and is divided among the workers. Any number of workers that divides the batch
  computes the same gradient, so a job that fewer workers finish ends with the same loss, up to rounding. (Numbers have
  double precision to keep rounding errors small.)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SOURCES = ("argparse.py", "ast.py", "dataclasses.py", "inspect.py", "pathlib.py", "textwrap.py", "typing.py")
CHARACTERS = 128
CONTEXT = 32


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description="Train a small character model with torch DDP.")
    parser.add_argument("--steps", type=int, default=240, help="total number of steps, including earlier runs")
    parser.add_argument("--batch", type=int, default=24, help="samples per step, over all workers")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--construction-seconds",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds to sleep, as if loading a large model",
    )
    parser.add_argument("--checkpoint-dir", type=Path, help="folder for the checkpoint (default: do not save)")
    parser.add_argument("--progress", type=Path, help="file or named pipe to which to write one line of JSON per event")
    return parser.parse_args()


class Progress:
    """Lines of JSON for a program that watches the job, short enough that a pipe keeps the workers' lines apart."""

    def __init__(self, path: Path | None) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) if path else None

    def tell(self, event: str, **details: float) -> None:
        """Write one line: what happened, in which worker, and details."""
        if self._file is not None:
            line = {"event": event, "rank": int(os.environ.get("RANK", "-1")), "pid": os.getpid(), **details}
            # Long lines: a pipe of one page holds only a few, so the training cannot get far ahead of the reader.
            os.write(self._file, (json.dumps(line).ljust(1000) + "\n").encode())


def corpus() -> torch.Tensor:
    """Some files of the standard library as one row of character codes, identical for all copies of a Python."""
    import torch

    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((folder / name).read_bytes() for name in SOURCES)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).clamp(max=CHARACTERS - 1).long()


def build_model(seed: int, seconds: float = 0.0) -> torch.nn.Module:
    """A recurrent network that guesses the next character at each place of its context.

    Args: `seed`: for the weights; `seconds`: how long to sleep, as if loading a large model.
    """
    time.sleep(seconds)
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(CHARACTERS, 48)
            self.recur = nn.GRU(48, 128, batch_first=True)
            self.guess = nn.Linear(128, CHARACTERS)

        def forward(self, text: torch.Tensor) -> torch.Tensor:
            hidden, _ = self.recur(self.embed(text))
            return self.guess(hidden)

    torch.manual_seed(seed)
    return Model().double()


def share(text: torch.Tensor, step: int, seed: int, batch: int, rank: int, world_size: int) -> torch.Tensor:
    """This worker's part of the batch of `step`. All parts together are the same for any number of workers."""
    import torch

    order = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - CONTEXT - 1, (batch,), generator=order)[rank::world_size]
    return text[starts[:, None] + torch.arange(CONTEXT + 1)]


class Checkpoint:
    """The only file that a resumed run needs."""

    def __init__(self, folder: Path | None) -> None:
        self.path = folder / "last.pt" if folder else None

    def load(self) -> dict[str, Any] | None:
        """The last saved state, or None."""
        import torch

        if self.path is None or not self.path.exists():
            return None
        found: dict[str, Any] = torch.load(self.path, weights_only=True)
        return found

    def save(self, state: dict[str, Any]) -> None:
        """Replace the file atomically. Returns when it is on disk."""
        import torch

        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".draft")
        with draft.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        os.fsync(folder)  # write the new name to disk too
        os.close(folder)


def train(options: argparse.Namespace, progress: Progress) -> None:
    """Train from the last checkpoint, if there is one, to the last step."""
    import torch
    import torch.distributed as dist
    import torch.distributed.nn.functional  # else DDP imports it later, and it keeps the group and gloo's threads alive
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    from rallypoint import notices

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if options.batch % world_size:
        raise SystemExit(f"--batch={options.batch} cannot be shared by {world_size} workers; choose a multiple")
    model = DistributedDataParallel(build_model(options.seed, options.construction_seconds))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    checkpoint, text, first = Checkpoint(options.checkpoint_dir), corpus(), 0
    mean, answered = torch.full((), float("nan"), dtype=torch.float64), 0
    if (saved := checkpoint.load()) is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first, mean = saved["step"], saved["loss"]
    progress.tell("training", step=first)
    if rank == 0:
        print(f"{world_size} workers, from step {first}", flush=True)
    for step in range(first + 1, options.steps + 1):
        sample = share(text, step, options.seed, options.batch, rank, world_size)
        loss = cross_entropy(model(sample[:, :-1]).flatten(0, 1), sample[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        notice = notices.pending()
        told = notice is not None and notice.number > answered
        # Workers see a notice at different steps, but all must save in the same one: when any worker has seen it.
        sums = torch.stack([loss.detach() / world_size, torch.tensor(float(told), dtype=torch.float64)])
        dist.all_reduce(sums)
        mean, asked = sums[0].clone(), bool(sums[1])
        if rank == 0:
            if asked or step % options.every == 0 or step == options.steps:
                print(f"step {step} loss {mean.item():.4f}{', saved before a stop' if asked else ''}", flush=True)
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "loss": mean}
                with notices.saving():
                    checkpoint.save(state)
            progress.tell("step", step=step)
        notices.progress(step)
        if asked:
            dist.barrier()  # the checkpoint exists, so each worker can report it
            notices.acknowledge()
            answered = answered if notice is None else notice.number
    if rank == 0:
        print(f"final loss {mean.item():.9f}", flush=True)
        progress.tell("done", loss=mean.item())
    dist.barrier()
    # Delete what refers to the group first, so that its threads end here and not during the interpreter's shutdown.
    del model, optimizer
    dist.destroy_process_group()


def main(train: Callable[[argparse.Namespace, Progress], None] = train) -> int:
    """Report this worker before importing torch, then train."""
    options = arguments()
    progress = Progress(options.progress)
    progress.tell("start")
    train(options, progress)
    return 0


if __name__ == "__main__":
    sys.exit(main())
