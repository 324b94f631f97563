"""Python stacks of workers that run, by py-spy, which reads them from outside without stopping their work for long."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

_TIMEOUT = 10.0
"""Seconds for the stacks of one worker."""
MAX_STACK = 256 * 1024
"""Characters of the stacks of one worker that are kept."""


class WorkerStacks(msgspec.Struct, frozen=True):
    """The stacks of one worker, by global rank: a text of all its threads, or why there is none."""

    rank: int
    pid: int
    text: str
    error: str = ""


_decoder = msgspec.json.Decoder(tuple[WorkerStacks, ...])


def stacks_of(pids: Mapping[int, int]) -> bytes:
    """The stacks of workers, encoded.

    Args:
        pids: process id by global rank.
    """
    program = _program()
    return msgspec.json.encode([_stacks_of_one(program, rank, pid) for rank, pid in sorted(pids.items())])


def decode_stacks(data: bytes) -> Sequence[WorkerStacks]:
    """What `stacks_of` has encoded.

    Raises:
        ValueError: these bytes are something else.
    """
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None


def _program() -> str | None:
    beside = Path(sysconfig.get_path("scripts")) / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _stacks_of_one(program: str | None, rank: int, pid: int) -> WorkerStacks:
    if program is None:
        return WorkerStacks(
            rank, pid, "", f"py-spy is not installed beside {sys.executable}; install rallypoint[stacks] on this node"
        )
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return WorkerStacks(rank, pid, "", f"py-spy gave no answer: {error}")
    if done.returncode == 0:
        return WorkerStacks(rank, pid, done.stdout[:MAX_STACK])
    return WorkerStacks(rank, pid, "", _why(done.stderr, pid))


def _why(said: str, pid: int) -> str:
    if "ermission denied" in said or "not permitted" in said:
        return (
            f"the kernel does not permit to read process {pid}; give the agent CAP_SYS_PTRACE, or set "
            "kernel.yama.ptrace_scope=0"
        )
    lines = [each for each in said.strip().splitlines() if each.strip()]
    return lines[-1] if lines else "py-spy failed and said nothing"


def grouped_stacks(found: Sequence[WorkerStacks]) -> list[str]:
    """Lines: equal stacks once, the most frequent first, with the ranks that have them; those of few are marked."""
    groups: dict[str, list[int]] = {}
    for each in sorted(found, key=lambda one: one.rank):
        groups.setdefault(each.error or normalized(each.text), []).append(each.rank)
    in_order = sorted(groups.items(), key=lambda entry: (-len(entry[1]), entry[1]))
    most = len(in_order[0][1]) if in_order else 0
    lines: list[str] = []
    for text, ranks in in_order:
        differs = "  <- differs" if len(in_order) > 1 and len(ranks) < most else ""
        lines += [f"{len(ranks)} rank{'' if len(ranks) == 1 else 's'} ({rank_ranges(ranks)}){differs}"]
        lines += [f"    {line}" for line in text.splitlines()]
    return lines


def normalized(text: str) -> str:
    """Stacks without what differs from process to process: the header with pid and command, thread numbers."""
    kept = []
    for line in text.splitlines():
        if line.startswith(("Process ", "Python v")) or not line.strip():
            continue
        kept.append(_thread_title(line) if line.startswith("Thread ") else line.strip())
    return "\n".join(f"  {line}" if not line.startswith("Thread") else line for line in kept)


def _thread_title(line: str) -> str:
    _, _, title = line.partition(": ")
    return f"Thread {title}" if title else "Thread"


def rank_ranges(ranks: Sequence[int]) -> str:
    """`0-2, 5` for 0, 1, 2 and 5, which are in order."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
