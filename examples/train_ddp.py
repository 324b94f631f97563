"""Train a small character model on the source of Python's standard library, with torch DDP on CPUs.

    rallyrun --standalone --nproc-per-node=2 --max-restarts=3 examples/train_ddp.py --checkpoint-dir=checkpoints

It is written as a job that is meant to survive should be written:

- it resumes from the last checkpoint, and a checkpoint is replaced in one step, so that a crash leaves the old or the
  new one and never half of one;
- it saves when it is told that it will be stopped (`rallypoint.notices`), in the step on which all workers agree;
- the batch of a step depends on the step alone. Workers share it out, so any number of them that divides the batch
  computes the same gradient, and a job finished by fewer workers ends with the same loss, up to rounding (numbers are
  of double precision to keep that small).
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
    parser.add_argument("--steps", type=int, default=240, help="steps to train in all, those of earlier runs included")
    parser.add_argument("--batch", type=int, default=24, help="samples a step, over all workers")
    parser.add_argument("--every", type=int, default=20, help="steps from one checkpoint to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--construction-seconds", type=float, default=0.0, metavar="S", help="sleep in place of loading a large model"
    )
    parser.add_argument("--checkpoint-dir", type=Path, help="folder of the checkpoint; without one none is saved")
    parser.add_argument(
        "--progress", type=Path, help="file or named pipe that gets a line of JSON for whatever happens"
    )
    return parser.parse_args()


class Progress:
    """Lines of JSON for whoever watches the job; short enough for a pipe to keep the lines of all workers apart."""

    def __init__(self, path: Path | None) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) if path else None

    def tell(self, event: str, **details: float) -> None:
        """Write one line: what happened, in which worker, and details."""
        if self._file is not None:
            line = {"event": event, "rank": int(os.environ.get("RANK", "-1")), "pid": os.getpid(), **details}
            # So long that a pipe of one page holds only a few: the training does not get far ahead of who reads.
            os.write(self._file, (json.dumps(line).ljust(1000) + "\n").encode())


def corpus() -> torch.Tensor:
    """A few files of the standard library as one row of character codes; the same with every copy of one Python."""
    import torch

    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((folder / name).read_bytes() for name in SOURCES)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).clamp(max=CHARACTERS - 1).long()


def build_model(seed: int, seconds: float = 0.0) -> torch.nn.Module:
    """A recurrent network that guesses the next character at each place of its context.

    Args: `seed`: for its weights; `seconds`: for which it sleeps, in place of loading a large one.
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
    """This worker's part of the batch of `step`. All parts together are the same whatever the number of workers."""
    import torch

    order = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - CONTEXT - 1, (batch,), generator=order)[rank::world_size]
    return text[starts[:, None] + torch.arange(CONTEXT + 1)]


class Checkpoint:
    """The one file that a resumed run needs."""

    def __init__(self, folder: Path | None) -> None:
        self.path = folder / "last.pt" if folder else None

    def load(self) -> dict[str, Any] | None:
        """What was saved last, or None."""
        import torch

        if self.path is None or not self.path.exists():
            return None
        found: dict[str, Any] = torch.load(self.path, weights_only=True)
        return found

    def save(self, state: dict[str, Any]) -> None:
        """Replace the file in one step, and return when it is on the disk."""
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
        os.fsync(folder)  # the new name is on the disk too
        os.close(folder)


def train(options: argparse.Namespace, progress: Progress) -> None:
    """Train from the last checkpoint, if there is one, to the last step."""
    import torch
    import torch.distributed as dist
    import torch.distributed.nn.functional  # else DDP imports it later, and it keeps the group, and gloo's threads
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
        # Workers see a notice at different steps, and all have to save in the same one: in that in which any has.
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
            dist.barrier()  # the checkpoint is there: who says so now says it for itself
            notices.acknowledge()
            answered = answered if notice is None else notice.number
    if rank == 0:
        print(f"final loss {mean.item():.9f}", flush=True)
        progress.tell("done", loss=mean.item())
    dist.barrier()
    # What holds the group goes first, so that its threads end here and not somewhere in the interpreter's own end.
    del model, optimizer
    dist.destroy_process_group()


def main(train: Callable[[argparse.Namespace, Progress], None] = train) -> int:
    """Tell that this worker is there before torch is imported, then train."""
    options = arguments()
    progress = Progress(options.progress)
    progress.tell("start")
    train(options, progress)
    return 0


if __name__ == "__main__":
    sys.exit(main())
