r"""JAX on several processes: resumes from the last checkpoint, and saves before a stop.

rallyrun --standalone --nproc-per-node=2 --max-restarts=3 --worker-env=jax train.py

`jax.distributed.initialize()` needs no arguments: with `--worker-env=jax`, it finds the coordinator, the number of
processes and its own rank in the environment. The batch depends only on the step and is divided among the devices of
all processes, so an interrupted job ends with the same loss as an uninterrupted one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rallypoint import notices

BATCH, FEATURES, HIDDEN = 48, 16, 32

Parameters = dict[str, Any]


def initial() -> Parameters:
    """The parameters before the first step, the same in every process."""
    draw = np.random.default_rng(0).normal
    return {
        "hidden": draw(scale=FEATURES**-0.5, size=(FEATURES, HIDDEN)).astype(np.float32),
        "out": draw(scale=HIDDEN**-0.5, size=HIDDEN).astype(np.float32),
    }


def batch_of(step: int) -> tuple[Any, Any]:
    """All samples of a step and their targets."""
    samples = np.random.default_rng(step + 1).normal(size=(BATCH, FEATURES)).astype(np.float32)
    return samples, np.sin(samples.sum(axis=1))


def loss_of(parameters: Parameters, samples: jax.Array, wanted: jax.Array) -> jax.Array:
    """The mean squared error of the model."""
    found = jnp.tanh(samples @ parameters["hidden"]) @ parameters["out"]
    return jnp.mean((found - wanted) ** 2)


@jax.jit
def train(parameters: Parameters, samples: jax.Array, wanted: jax.Array) -> tuple[Parameters, jax.Array]:
    """One step of gradient descent over the samples of all processes."""
    loss, gradient = jax.value_and_grad(loss_of)(parameters, samples, wanted)
    return jax.tree.map(lambda value, slope: value - 0.1 * slope, parameters, gradient), loss


def load(path: Path) -> tuple[int, Parameters]:
    """The step to start from, and its parameters."""
    if not path.exists():
        return 0, initial()
    with np.load(path) as saved:
        return int(saved["step"]), {name: saved[name] for name in initial()}


def save(path: Path, step: int, parameters: Parameters) -> None:
    """Replace the checkpoint atomically: a crash leaves the old one or the new one, never half a checkpoint."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft.npz")
    with notices.saving():  # a stop waits for the end of this block
        np.savez(draft, step=np.asarray(step), **{name: np.asarray(value) for name, value in parameters.items()})
        draft.replace(path)


def on_devices(value: Any, sharding: NamedSharding) -> jax.Array:
    """A value that every process has completely, as one array over the devices of all processes."""
    return jax.make_array_from_callback(value.shape, sharding, lambda where: value[where])


def told_to_save() -> bool:
    """Whether any worker has a notice of a stop. Workers see it at different steps, but must save in the same one."""
    return bool(multihost_utils.process_allgather(np.asarray(notices.pending() is not None)).any())


def main() -> None:
    """Train from the last checkpoint, if there is one, to the last step."""
    parser = argparse.ArgumentParser(description="Train a small model with JAX.")
    parser.add_argument("--steps", type=int, default=200, help="total number of steps, including earlier runs")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"), help="folder shared by all nodes")
    options = parser.parse_args()

    jax.distributed.initialize()
    rank, checkpoint = jax.process_index(), options.checkpoint_dir / "last.npz"
    mesh = Mesh(jax.devices(), ("samples",))
    shared, everywhere = NamedSharding(mesh, PartitionSpec("samples")), NamedSharding(mesh, PartitionSpec())
    first, start = load(checkpoint)
    parameters = {name: on_devices(value, everywhere) for name, value in start.items()}
    if rank == 0:
        print(f"{jax.process_count()} workers, from step {first}\n", end="", flush=True)
    for step in range(first + 1, options.steps + 1):
        parameters, loss = train(parameters, *(on_devices(each, shared) for each in batch_of(step)))
        told = told_to_save()
        if rank == 0:
            print(f"step {step} loss {float(loss):.9f}\n", end="", flush=True)
            if told or step % options.every == 0 or step == options.steps:
                save(checkpoint, step, parameters)
        if told:
            notices.acknowledge()
    error = loss_of(parameters, *(on_devices(each, shared) for each in batch_of(options.steps + 1)))
    if rank == 0:
        print(f"final loss {float(error):.9f}\n", end="", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
