"""Real processes that hold timers, and waits for their results."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rallypoint.base.open_process import open_process
from rallypoint.base.process_table import process_table

TIMEOUT = 120.0
"""Seconds."""

_BEGINS = """
import faulthandler, os, signal, sys, time
from rallypoint.workers.timers import FileTimerClient
faulthandler.enable()
client = FileTimerClient(sys.argv[1], int(sys.argv[3]))
"""
_SETS = 'client.acquire("scope", time.time() + float(sys.argv[2])); print("up", flush=True)'
HOLDS = f"{_BEGINS}{_SETS}\n"
"""Sets a timer; append the rest of the program. Arguments: pipe, seconds, signal."""
HANGS = f"{_BEGINS}def hangs_here(): {_SETS}; signal.pause()\nhangs_here()\n"
"""Sets a timer and hangs in `hangs_here`."""


class Driven(Protocol):
    """An object with a loop."""

    def fds(self) -> list[int]: ...

    def wake_at(self) -> float: ...


def until(what: Driven, holds: Callable[[], bool], *also: int) -> None:
    """Run a loop until `holds`, which takes the steps; the descriptors in `also` wake the loop too."""
    deadline = time.monotonic() + TIMEOUT
    while not holds():
        assert time.monotonic() < deadline, "it takes too long"
        poller = select.poll()
        for fd in (*what.fds(), *also):
            poller.register(fd, select.POLLIN)
        seconds = min(what.wake_at(), deadline) - time.monotonic()
        poller.poll(max(0.0, seconds) * 1000 + 1)


class Holder:
    """A process that holds a timer."""

    def __init__(self, text: str, *args: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", text, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self.handle = open_process(self.pid)

    def is_up(self) -> None:
        """Wait until it is ready."""
        assert self.says() == "up\n"

    def says(self) -> str:
        """Its next line of standard output."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def ended(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def ends(self) -> tuple[int, str]:
        """Its exit code and standard error, once it has ended."""
        _, errors = self._process.communicate(timeout=TIMEOUT)
        return self._process.returncode, errors

    def finishes(self) -> tuple[int, str]:
        """The same, for a process that waits for the end of its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.stdin = None
        return self.ends()

    def stop(self) -> None:
        """End it, and close its pipes."""
        self._process.kill()
        self._process.communicate(timeout=TIMEOUT)
        self.handle.close()


@contextmanager
def holder(text: str, *args: object) -> Iterator[Holder]:
    """A process, ended afterwards."""
    process = Holder(text, *map(str, args))
    try:
        yield process
    finally:
        process.stop()


def _waits_for_a_child(pid: int) -> bool:
    """Whether a process is in state D for its child, not for a moment to load a page of its program."""
    table = process_table()
    return table[pid].state == "D" and any(process.parent == pid for process in table.values())


@contextmanager
def in_state_d(folder: Path) -> Iterator[int]:
    """The pid of a process in uninterruptible sleep: it waits for a child that cannot reach its own program."""
    pipe = str(folder / "held")
    os.mkfifo(pipe)
    text = (
        "import os, sys\n"
        "actions = [(os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)]\n"
        "os.waitpid(os.posix_spawn('/bin/true', ['true'], {}, file_actions=actions), 0)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", text, pipe])
    try:
        deadline = time.monotonic() + TIMEOUT
        while not _waits_for_a_child(process.pid):
            assert time.monotonic() < deadline
            os.sched_yield()
        yield process.pid
    finally:
        os.close(os.open(pipe, os.O_WRONLY))
        assert process.wait(TIMEOUT) == 0
