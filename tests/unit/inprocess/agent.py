"""Play the agent for one real worker process."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rallypoint.base.inotify import CREATED, Inotify
from rallypoint.notices import FIFO_PREFIX, LEFT_PREFIX, ROUND_PREFIX

DEADLINE = 120.0

PREAMBLE = """
import os, sys, time
from rallypoint import inprocess
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


class Agent:
    """Starts a worker with local rank 0, notifies it of rounds, and reads its output line by line."""

    def __init__(self, folder: Path, code: str, **variables: str) -> None:
        """Args: `folder`: the folder for notices, which does not exist yet; `code`: the program after `PREAMBLE`."""
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + code],
            env={**os.environ, "RALLYPOINT_NOTICES": str(folder), "LOCAL_RANK": "0", **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        self._rest = b""

    @property
    def fifo(self) -> Path:
        return self.folder / (FIFO_PREFIX + "0")

    def line(self) -> str:
        """The next line of output; empty if the worker has ended."""
        assert self.process.stdout is not None
        over_at = time.monotonic() + DEADLINE
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, over_at - time.monotonic()))
            assert ready, f"no output for {DEADLINE} s after {self._rest!r}"
            if not (data := os.read(self.process.stdout.fileno(), 4096)):
                return ""
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def release(self) -> None:
        """Write a line to the standard input of the worker."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    def order(self, *lines: str, fifo: Path | None = None) -> None:
        """Write into the FIFO, all at once."""
        file = os.open(fifo or self.fifo, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(file, "".join(f"{line}\n" for line in lines).encode())
        finally:
            os.close(file)

    def prepare(self, round_: int, **environment: str | None) -> None:
        """Write the variables of a round."""
        draft = self.folder / "draft"
        draft.write_text(json.dumps({"round": round_, "environment": environment}))
        draft.replace(self.folder / f"{ROUND_PREFIX}0.json")

    def enter(self, round_: int, **environment: str | None) -> None:
        """Begin a round."""
        self.prepare(round_, **environment)
        self.order(f"enter {round_}")

    def leave(self, round_: int) -> None:
        """End a round, and wait until the worker has left it."""
        self.order(f"leave {round_}")
        self.wait_until_left(round_)

    def wait_until_left(self, round_: int) -> None:
        """Wait until the worker has left that round."""
        self.wait_for(f"{LEFT_PREFIX}0.{round_}")

    def wait_for(self, name: str) -> None:
        """Wait until the worker has made this file."""
        path, began = self.folder / name, time.monotonic()
        watch = Inotify()
        try:
            watch.watch(str(self.folder), CREATED)
            while not path.exists():
                rest = began + DEADLINE - time.monotonic()
                assert select.select([watch], [], [], max(0.0, rest))[0], f"{path.name} is missing"
                watch.changed()
        finally:
            watch.close()

    def next_round(self, ended: int, **environment: str | None) -> float:
        """End a round, and begin the next; returns the seconds until the worker had left."""
        began = time.monotonic()
        self.leave(ended)
        seconds = time.monotonic() - began
        self.enter(ended + 1, **environment)
        return seconds

    def end(self) -> tuple[int, str]:
        """Wait for the worker's end: exit code, and standard error."""
        _, errors = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, errors.decode()


@contextmanager
def worker(folder: Path, code: str, **variables: str) -> Iterator[Agent]:
    """A worker, which is killed at the end."""
    agent = Agent(folder / "notices", code, **variables)
    with agent.process as process:
        try:
            yield agent
        finally:
            process.kill()
