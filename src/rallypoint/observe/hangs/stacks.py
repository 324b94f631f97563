"""Python stacks of workers that run, by py-spy, which reads them from outside without stopping their work for long."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from rallypoint.base.clock import Deadline
from rallypoint.base.log import printable

TIMEOUT = 10.0
"""Seconds for the stacks of all workers of a node."""
_MAX_LINE = 1000
_AT_ONCE = 16
"""Workers that are read at the same time."""
MAX_STACK = 256 * 1024
"""Characters of the stacks of one worker that are kept."""


class WorkerStacks(msgspec.Struct, frozen=True):
    """The stacks of one worker, by global rank: a text of all its threads, or why there is none."""

    rank: int
    pid: int
    text: str
    error: str = ""

    def printable(self) -> WorkerStacks:
        text = "\n".join(printable(line, _MAX_LINE) for line in self.text[:MAX_STACK].split("\n"))
        return WorkerStacks(self.rank, self.pid, text, printable(self.error))


_decoder = msgspec.json.Decoder(tuple[WorkerStacks, ...])


def stacks_of(pids: Mapping[int, int]) -> bytes:
    return msgspec.json.encode(stacks_of_workers(pids))


def stacks_of_workers(pids: Mapping[int, int], deadline: Deadline | None = None) -> list[WorkerStacks]:
    """The stacks of workers (pid by global rank), read side by side until `deadline` (`TIMEOUT` from now), by rank."""
    if not pids:
        return []
    program, deadline = _program(), deadline or Deadline.after(TIMEOUT)
    with ThreadPoolExecutor(min(len(pids), _AT_ONCE), "stacks") as pool:
        return list(pool.map(lambda entry: _stacks_of_one(program, deadline, *entry), sorted(pids.items())))


def decode_stacks(data: bytes) -> Sequence[WorkerStacks]:
    """Raises ValueError if these bytes are no result of `stacks_of`."""
    try:
        return [each.printable() for each in _decoder.decode(data)]
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None


def _program() -> str | None:
    beside = Path(sysconfig.get_path("scripts")) / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _stacks_of_one(program: str | None, deadline: Deadline, rank: int, pid: int) -> WorkerStacks:
    if program is None:
        return WorkerStacks(
            rank, pid, "", f"py-spy is not installed beside {sys.executable}: pip install rallypoint[stacks]"
        )
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--full-filenames", "--pid", str(pid)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=max(0.1, deadline.remaining()),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return WorkerStacks(rank, pid, "", f"py-spy gave no answer within {TIMEOUT:g} s")
    except OSError as error:
        return WorkerStacks(rank, pid, "", f"py-spy cannot be started: {error.strerror or error}")
    if done.returncode == 0:
        return WorkerStacks(rank, pid, done.stdout[:MAX_STACK])
    return WorkerStacks(rank, pid, "", _why(done.stderr))


def _why(said: str) -> str:
    if "ermission denied" in said or "not permitted" in said:
        return (
            "the kernel does not permit to read the process; give the agent CAP_SYS_PTRACE, or set "
            "kernel.yama.ptrace_scope=0"
        )
    lines = [each for each in said.strip().splitlines() if each.strip()]
    return lines[-1] if lines else "py-spy failed and said nothing"
