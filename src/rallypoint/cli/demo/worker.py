"""The program of `rallyctl demo`: a small network learns the sine, by any number of workers, in plain Python.

    rallyrun --standalone --nproc-per-node=2 --max-restarts=3 -m rallypoint.cli.demo.worker --checkpoint-dir=checkpoints

It is an example of a job that survives failures. It resumes from the last checkpoint, which it replaces in one step.
The batch of a step depends only on the step, so the final loss does not depend on which worker computed it, or how
often. It also runs with torchrun, and does not need torch.

Laws of `Peers`, which adds up numbers over TCP like gloo's or NCCL's `all_reduce` in real training:

1. Rank 0 adds numbers in order of rank, so that all workers get the same bits, in every run with the same number of
   workers.
2. When a worker is gone, its connection ends, which is immediately an error for all others.
3. A worker that finds the address of an earlier round tries again: only rank 0 of this round says hello.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import socket
import stat
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rallypoint import notices
from rallypoint.store.client import TCPStore

_HIDDEN = 16
_RATE, _MOMENTUM = 0.05, 0.9
_WIDTH = 1000
"""Bytes per line in a named pipe."""

_HELLO = b"demo"
_KEY = "rallypoint/cli/demo/address"
_MEETING = 60.0
"""Seconds for all workers of a round to connect."""
_RETRY = 0.02

Weights = list[float]
"""For each hidden unit its weight, bias and weight in the output; then the output's bias."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network to learn the sine, in plain Python.")
    parser.add_argument("--steps", type=int, default=240, help="total number of steps, including earlier runs")
    parser.add_argument("--batch", type=int, default=6000, help="samples per step, over all workers")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-dir", type=Path, help="folder for the checkpoint (default: do not save)")
    parser.add_argument("--progress", type=Path, help="file or named pipe to which to write one line of JSON per event")
    return parser.parse_args(argv)


class TrainingProgress:
    """Lines of JSON for the demo that watches the job; short enough for a pipe to keep all workers' lines separate.

    In a named pipe, spaces make each line so long that a pipe of one page (`cli.demo.job`) has room for only a few:
    the training cannot get far ahead of the reader.
    """

    def __init__(self, path: Path | None, rank: int) -> None:
        self._rank = rank
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) if path else None
        self._width = _WIDTH if self._file is not None and stat.S_ISFIFO(os.fstat(self._file).st_mode) else 0

    def report(self, event: str, **details: float) -> None:
        if self._file is not None:
            line = {"event": event, "rank": self._rank, "pid": os.getpid(), **details}
            os.write(self._file, (json.dumps(line).ljust(self._width) + "\n").encode())


class PeersError(Exception):
    """The other workers are gone, or did not connect."""


class Peers:
    def __init__(self, rank: int, world_size: int, store: tuple[str, int]) -> None:
        """Wait until all workers are connected. Rank 0 puts its address into `store`, the round's store."""
        self._rank = rank
        self._others: list[socket.socket] = []
        if world_size == 1:
            return
        meeting_store = TCPStore(*store, timeout=_MEETING)
        try:
            self._others = _accept(world_size, meeting_store) if rank == 0 else [_connect(rank, meeting_store)]
        except (OSError, TimeoutError) as error:
            raise PeersError(f"not all of the {world_size} workers connected: {error}") from None

    def sum(self, numbers: Sequence[float]) -> tuple[float, ...]:
        """Add up each number over all workers. Raises PeersError if a worker is gone."""
        form = struct.Struct(f"<{len(numbers)}d")
        try:
            if self._rank:
                self._others[0].sendall(form.pack(*numbers))
                return form.unpack(_receive(self._others[0], form.size))
            parts = [tuple(numbers), *(form.unpack(_receive(peer, form.size)) for peer in self._others)]
            total = tuple(map(sum, zip(*parts, strict=True)))
            for peer in self._others:
                peer.sendall(form.pack(*total))
            return total
        except OSError as error:
            raise PeersError(f"a worker is gone: {error}") from None

    def close(self) -> None:
        for peer in self._others:
            peer.close()


def _accept(world_size: int, store: TCPStore) -> list[socket.socket]:
    connections: dict[int, socket.socket] = {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_MEETING)
        store.set(_KEY, str(server.getsockname()[1]).encode())
        while len(connections) < world_size - 1:
            connection, _ = server.accept()
            connection.settimeout(_MEETING)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(_HELLO)
            connections[int.from_bytes(_receive(connection, 4), "little")] = connection
    return [connections[rank] for rank in sorted(connections)]


def _connect(rank: int, store: TCPStore) -> socket.socket:
    deadline = time.monotonic() + _MEETING
    while time.monotonic() < deadline:
        with suppress(OSError):
            connection = socket.create_connection(("127.0.0.1", int(store.get(_KEY))), timeout=_MEETING)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if _receive(connection, len(_HELLO)) == _HELLO:
                connection.sendall(rank.to_bytes(4, "little"))
                return connection
        time.sleep(_RETRY)
    raise TimeoutError(f"rank 0 did not answer within {_MEETING:.0f} s")


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionResetError("the connection was closed")
        data += more
    return bytes(data)


def gradient(weights: Weights, samples: list[float]) -> Weights:
    """Sum the gradient of the squared error over samples; append the sum of the squared errors."""
    total = [0.0] * (len(weights) + 1)
    tanh = math.tanh
    for x in samples:
        inner = [tanh(weights[3 * unit] * x + weights[3 * unit + 1]) for unit in range(_HIDDEN)]
        error = weights[-1] - math.sin(x)
        for unit, value in enumerate(inner):
            error += weights[3 * unit + 2] * value
        for unit, value in enumerate(inner):
            back = error * weights[3 * unit + 2] * (1.0 - value * value)
            total[3 * unit] += back * x
            total[3 * unit + 1] += back
            total[3 * unit + 2] += error * value
        total[-2] += error
        total[-1] += error * error
    return total


def share(step: int, options: argparse.Namespace, rank: int, world_size: int) -> list[float]:
    """This worker's samples for a step. All shares together are the same for any number of workers."""
    order = random.Random(options.seed * 1_000_003 + step)
    return [order.uniform(-math.pi, math.pi) for _ in range(options.batch)][rank::world_size]


def save(path: Path | None, state: dict[str, object]) -> None:
    """Replace the checkpoint atomically."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    with notices.saving(), draft.open("w") as file:
        json.dump(state, file)
        file.flush()
        os.fsync(file.fileno())
        draft.replace(path)


def train(options: argparse.Namespace, progress: TrainingProgress, rank: int, peers: Peers, world_size: int) -> None:
    """Train from the last checkpoint, if any, to the last step."""
    start = random.Random(options.seed)
    weights = [start.uniform(-0.5, 0.5) for _ in range(3 * _HIDDEN + 1)]
    speeds, first, loss = [0.0] * len(weights), 0, math.nan
    path = options.checkpoint_dir / "last.json" if options.checkpoint_dir else None
    if path is not None and path.exists():
        saved = json.loads(path.read_text())
        weights, speeds, first, loss = saved["weights"], saved["speeds"], saved["step"], saved["loss"]
    progress.report("training", step=first)
    if rank == 0:
        print(f"{world_size} workers, from step {first}", flush=True)
    for step in range(first + 1, options.steps + 1):
        *slopes, squares = peers.sum(gradient(weights, share(step, options, rank, world_size)))
        loss = squares / options.batch
        speeds = [
            _MOMENTUM * speed - _RATE * slope / options.batch for speed, slope in zip(speeds, slopes, strict=True)
        ]
        weights = [weight + speed for weight, speed in zip(weights, speeds, strict=True)]
        if rank == 0:
            if step % options.every == 0 or step == options.steps:
                print(f"step {step} loss {loss:.6f}", flush=True)
                save(path, {"weights": weights, "speeds": speeds, "step": step, "loss": loss})
            progress.report("step", step=step)
    if rank == 0:
        print(f"final loss {loss:.9f}", flush=True)
        progress.report("done", loss=loss)


def main() -> int:
    """Meet the other workers, and train. If a worker is gone, this one ends: the launcher restarts all of them."""
    options = arguments()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    progress = TrainingProgress(options.progress, rank)
    progress.report("start")
    try:
        store = (os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500")))
        peers = Peers(rank, world_size, store)
        train(options, progress, rank, peers, world_size)
        peers.sum((0.0,))  # no worker ends before all have the last sum
        peers.close()
    except PeersError as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
