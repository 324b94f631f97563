"""Interrupts a training step of torch at random moments, like the end of a round, and looks for leftovers.

The function is a real one, called by `inprocess.resumable`; the agent is a thread of the same process, so a round takes
milliseconds. The leftovers are checked twice: right after the interruption, and when the function is called again,
after the switches have been restored.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rallypoint import inprocess
from rallypoint.inprocess import torch_switches
from rallypoint.notices import FIFO_PREFIX, LEFT_PREFIX, ROUND_PREFIX

DEADLINE = 60.0
"""Seconds until a round that has ended must have been left: whoever waits longer waits for a lock that nobody holds."""


class Pair:
    """Counts what is taken and given back in each way that Python has for it."""

    def __init__(self) -> None:
        self.open = 0

    def take(self) -> None:
        """In one step, as a call in C."""
        self.open += 1

    def give_back(self) -> None:
        self.open -= 1

    @contextmanager
    def taken(self) -> Iterator[None]:
        self.take()
        try:
            yield
        finally:
            self.give_back()


class Step:
    """A training step: a data loader, autocast, no_grad, inference mode and locks."""

    def __init__(self, loader_workers: int) -> None:
        import torch

        torch.set_num_threads(1)
        self._torch = torch
        self._layer = torch.nn.Linear(64, 64)
        self._data = torch.utils.data.TensorDataset(torch.randn(10_000, 64))
        self._loader_workers = loader_workers
        self.thread_lock, self.process_lock = threading.Lock(), multiprocessing.Lock()
        self.condition = threading.Condition()
        self.pair = Pair()

    def run(self) -> None:
        """Train without an end."""
        while True:
            loader = self._torch.utils.data.DataLoader(self._data, batch_size=8, num_workers=self._loader_workers)
            for (batch,) in loader:
                self._step(batch)

    def _step(self, batch: Any) -> None:
        torch = self._torch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self._layer(batch).sum()
        loss.backward()
        with self.process_lock, self.condition, self.pair.taken():
            self._layer.zero_grad()
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            (self._layer(batch) > 0).sum()
        with (
            torch.inference_mode(),
            torch.set_grad_enabled(False),
        ):
            self._layer(batch)
        self._evaluate(batch)
        self.thread_lock.acquire()
        try:
            self._layer(batch)
        finally:
            self.thread_lock.release()
        if not self.process_lock.acquire(timeout=10):
            raise TimeoutError
        try:
            self._layer(batch)
        finally:
            self._layer.zero_grad()
            self.process_lock.release()

    def _evaluate(self, batch: Any) -> None:
        with self._torch.set_grad_enabled(False):
            self._layer(batch)

    def held(self) -> list[str]:
        """The locks that are held. Takes each and gives it back."""
        locks: dict[str, Any] = {
            "thread lock": self.thread_lock,
            "process lock": self.process_lock,
            "condition": self.condition,
        }
        found = [name for name, lock in locks.items() if not lock.acquire(False)]
        for name in locks.keys() - found:
            locks[name].release()
        if self.pair.open:
            found.append("pair")
            self.pair.open = 0
        return found


class _Agent(threading.Thread):
    """Ends each round a moment after the function was called, and begins the next one."""

    def __init__(self, number: int, folder: Path, seed: int) -> None:
        super().__init__(daemon=True)
        self._number, self._folder, self._moments = number, folder, random.Random(seed)
        self.entered = threading.Semaphore(0)

    def run(self) -> None:
        for round_ in range(self._number):
            self.entered.acquire()
            time.sleep(self._moments.uniform(0.0, 0.01))
            self._order(f"leave {round_}")
            left, until = self._folder / f"{LEFT_PREFIX}0.{round_}", time.monotonic() + DEADLINE
            while not left.exists():
                if time.monotonic() > until:
                    os.write(2, f"round {round_} was not left within {DEADLINE:.0f} s\n".encode())
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.0002)
            left.unlink()
            following = {"round": round_ + 1, "environment": {}}
            (self._folder / f"{ROUND_PREFIX}0.json").write_text(json.dumps(following))
            self._order(f"enter {round_ + 1}")

    def _order(self, line: str) -> None:
        with open(self._folder / (FIFO_PREFIX + "0"), "w") as orders:
            orders.write(f"{line}\n")


def interrupt(number: int, loader_workers: int, folder: Path, seed: int, say: Callable[[str], None]) -> Counter[str]:
    """Interrupt it `number` times. Returns how often each switch was wrong, each lock held, and a process left.

    Args:
        number: of interruptions.
        loader_workers: processes of the data loader, which begins anew in each round.
        folder: an empty one, for the files between agent and worker.
        seed: of the moments.
        say: takes a line now and then.
    """
    os.environ |= {"RALLYPOINT_NOTICES": str(folder), "LOCAL_RANK": "0"}
    step, found, agent = Step(loader_workers), Counter[str](), _Agent(number, folder, seed)
    before = torch_switches.read()
    turns = 0

    def look(when: str) -> None:
        now = torch_switches.read()
        assert before is not None
        assert now is not None
        for name, then, value in zip(before._fields, before, now, strict=True):
            found[f"{when}: {name}"] += then != value

    @inprocess.resumable
    def train(_round: inprocess.Round) -> None:
        nonlocal turns
        look("in the next round")
        for child in multiprocessing.active_children():
            found["processes of a data loader"] += 1
            child.kill()
        if turns and turns % 500 == 0:
            say(f"{turns} interruptions: {dict(+found) or 'nothing is left'}")
        if turns == number:
            return
        try:
            turns += 1
            agent.entered.release()
            step.run()
        finally:
            look("interrupted")
            found.update(f"held: {name}" for name in step.held())

    agent.start()
    train()
    agent.join()
    return +found
