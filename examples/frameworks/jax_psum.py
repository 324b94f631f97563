r"""Data-parallel training with JAX on CPUs that resumes from its last checkpoint; torch is not needed.

rallyrun --standalone --nproc-per-node=2 --max-restarts=3 examples/frameworks/jax_psum.py \
    --checkpoint-dir=checkpoints
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from pathlib import Path

import numpy as np

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from jax import numpy as jnp
from jax.experimental import multihost_utils


def coordinator(folder: Path, rank: int) -> str:
    """Where JAX's own coordinator of this round listens: worker 0 picks a port, the others find it in a file.

    The file is named by the round's store, which no other round has.
    """
    round_name = f"{os.environ['TORCHELASTIC_RUN_ID']}-{os.environ['MASTER_PORT']}".replace("/", "_")
    path = folder / f"coordinator-{round_name}"
    if rank == 0:
        with socket.create_server(("", 0)) as probe:
            port = probe.getsockname()[1]
        draft = path.with_suffix(".draft")
        draft.write_text(f"{os.environ['MASTER_ADDR']}:{port}")
        draft.replace(path)
    while not path.exists():
        time.sleep(0.01)
    return path.read_text()


def main() -> None:
    """Train from the last checkpoint, if there is one, to the last step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=5, help="steps from one checkpoint to the next")
    parser.add_argument("--checkpoint-dir", type=Path, required=True)
    options = parser.parse_args()
    options.checkpoint_dir.mkdir(parents=True, exist_ok=True)

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator(options.checkpoint_dir, rank), world_size, rank)
    checkpoint = options.checkpoint_dir / "last.npz"
    weights, first = jnp.zeros(8), 0
    if checkpoint.exists():
        with np.load(checkpoint) as saved:
            weights, first = jnp.asarray(saved["weights"]), int(saved["step"])

    inputs = np.random.default_rng(0).normal(size=(16 * world_size, 8)).astype(np.float32)[rank::world_size]
    slope = jax.jit(jax.grad(lambda w, x, y: jnp.mean((x @ w - y) ** 2)))
    for step in range(first + 1, options.steps + 1):
        features = inputs[4 * (step % 4) : 4 * (step % 4) + 4]
        slopes = multihost_utils.process_allgather(slope(weights, features, features.sum(1)))
        weights = weights - 0.1 * jnp.asarray(slopes).reshape(world_size, -1).mean(axis=0)
        if rank == 0:
            print(f"step {step}", flush=True)
            if step % options.every == 0:
                draft = checkpoint.with_suffix(".draft.npz")
                np.savez(draft, weights=np.asarray(weights), step=step)
                draft.replace(checkpoint)
    if rank == 0:
        print(f"final loss {float(jnp.abs(weights).sum()):.9f}", flush=True)
    multihost_utils.sync_global_devices("the end")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
