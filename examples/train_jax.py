r"""Train a small model with JAX on several processes; after a restart it goes on from the last checkpoint.

    rallyrun --standalone --nproc-per-node=2 --max-restarts=3 --worker-env=jax \
        examples/train_jax.py --checkpoint=model.npz

`jax.distributed.initialize()` needs no argument: `--worker-env=jax` tells it the coordinator, the number of processes
and its own rank. The batch of a step depends on the step alone, and is shared out among the devices of all processes,
so that a job which was interrupted ends with the same loss as one that was not.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

BATCH = 48
FEATURES = 16
HIDDEN = 32

Parameters = dict[str, Any]


def initial() -> Parameters:
    """The parameters before the first step; the same in every process."""
    draw = np.random.default_rng(0).normal
    return {
        "hidden": draw(scale=FEATURES**-0.5, size=(FEATURES, HIDDEN)).astype(np.float32),
        "out": draw(scale=HIDDEN**-0.5, size=HIDDEN).astype(np.float32),
    }


def batch_of(step: int) -> tuple[Any, Any]:
    """All samples of a step, and what the model is to make of them."""
    samples = np.random.default_rng(step + 1).normal(size=(BATCH, FEATURES)).astype(np.float32)
    return samples, np.sin(samples.sum(axis=1))


def loss_of(parameters: Parameters, samples: jax.Array, wanted: jax.Array) -> jax.Array:
    """The mean square error of the model."""
    found = jnp.tanh(samples @ parameters["hidden"]) @ parameters["out"]
    return jnp.mean((found - wanted) ** 2)


@jax.jit
def train(parameters: Parameters, samples: jax.Array, wanted: jax.Array) -> tuple[Parameters, jax.Array]:
    """One step of gradient descent over the samples of all processes."""
    loss, gradient = jax.value_and_grad(loss_of)(parameters, samples, wanted)
    return jax.tree.map(lambda value, slope: value - 0.1 * slope, parameters, gradient), loss


def load(path: Path | None) -> tuple[int, Parameters]:
    """The step to begin with, and the parameters there."""
    if path is None or not path.exists():
        return 0, initial()
    with np.load(path) as saved:
        return int(saved["step"]), {name: saved[name] for name in initial()}


def save(path: Path, step: int, parameters: Parameters) -> None:
    """Replace the checkpoint in one move, so that a crash leaves the old or the new one and never half of one."""
    unfinished = path.with_name(path.name + ".new")
    with unfinished.open("wb") as file:
        arrays: dict[str, Any] = {name: np.asarray(value) for name, value in parameters.items()}
        np.savez(file, step=np.asarray(step), **arrays)
    unfinished.replace(path)


def on_devices(value: Any, sharding: NamedSharding) -> jax.Array:
    """An array that every process has as a whole, over the devices of all of them."""
    return jax.make_array_from_callback(value.shape, sharding, lambda where: value[where])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Train a small model with JAX.")
    parser.add_argument("--steps", type=int, default=200, help="steps in all, those of earlier runs included")
    parser.add_argument("--every", type=int, default=20, help="steps from one checkpoint to the next")
    parser.add_argument("--checkpoint", type=Path, help="file that all nodes share; without one nothing is saved")
    parser.add_argument("--kill-at", type=int, default=-1, help="the step at which the last process kills itself, once")
    asked = parser.parse_args()

    jax.distributed.initialize()
    rank, last = jax.process_index(), jax.process_count() - 1
    mesh = Mesh(jax.devices(), ("samples",))
    shared, everywhere = NamedSharding(mesh, PartitionSpec("samples")), NamedSharding(mesh, PartitionSpec())
    step, start = load(asked.checkpoint)
    parameters = {name: on_devices(value, everywhere) for name, value in start.items()}
    print(f"rank {rank} of {last + 1}: from step {step}", flush=True)
    loss = None
    while step < asked.steps:
        if step == asked.kill_at and rank == last and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), 9)
        samples, wanted = (on_devices(each, shared) for each in batch_of(step))
        parameters, loss = train(parameters, samples, wanted)
        step += 1
        if asked.checkpoint is not None and step % asked.every == 0:
            loss.block_until_ready()
            if rank == 0:
                save(asked.checkpoint, step, parameters)
    if rank == 0 and loss is not None:
        print(f"final loss {float(loss):.6f}", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
