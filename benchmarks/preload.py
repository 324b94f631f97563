"""Workers that import torch, forked by `--preload`: how soon they are back, and what that costs in memory."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from functools import partial

from benchmarks.case import OURS, THEIRS, BenchError, Budget, Case, Row, Settings, Turns, in_turn, row
from benchmarks.children import ROOT, Child, Children, descendants, launcher
from benchmarks.jobs import COMMANDS, Worker, after_a_kill, first_lines

_WORKER = str(ROOT / "benchmarks" / "programs" / "imports_torch.py")
_NOT_PRELOADED = "not preloaded"
_AUTO = "auto"
_AUTO_TIMEOUT = 120.0
"""Seconds for what the script imports to be preloaded; it begins ten seconds after the workers have started."""
_SETTLE = 1.0  # seconds after the last worker's line, as in `memory`
_NAME = "rally-zygote"
_PSS = re.compile(r"^Pss:\s+(\d+) kB$", re.MULTILINE)


def _run(settings: Settings) -> list[Row]:
    sides = {side: partial(_restart, side) for side in (OURS, _AUTO, THEIRS)}
    restart = in_turn("restart of preloaded workers", settings.rounds, sides, warm_up=True)
    memory = in_turn(
        "memory of preloaded workers", 1, {side: partial(_memory, side) for side in (OURS, _NOT_PRELOADED)}
    )
    zygotes = [zygote for _, zygote in memory.results.get(OURS, [])]
    remarks = tuple(f"of this, {zygote:.0f} MB are the zygote's share" for zygote in zygotes)
    both = Turns({side: [whole for whole, _ in found] for side, found in memory.results.items()}, memory.failures)
    compared = Turns({OURS: both.results.get(OURS, []), THEIRS: both.results.get(_NOT_PRELOADED, [])}, memory.failures)
    found = row("memory of 2 workers with torch and their zygote (PSS)", "MB", compared, None, remarks)
    automatic = Turns({OURS: restart.results.get(_AUTO, []), THEIRS: restart.results.get(THEIRS, [])}, restart.failures)
    what = "worker SIGKILL to restarted workers' first line after importing torch"
    return [
        row(f"{what}, preloaded", "s", restart, Budget(0.08)),
        row(f"{what}, --preload=auto", "s", automatic, Budget(0.08)),
        replace(found, base_name="2 workers that are not preloaded"),
    ]


def _start(children: Children, side: str) -> Child:
    preload = {OURS: ["--preload=torch"], _AUTO: ["--preload=auto"]}.get(side, [])
    name = COMMANDS[THEIRS if side == THEIRS else OURS]
    argv = [launcher(name), "--standalone", "--nproc-per-node=2", "--max-restarts=1", *preload, _WORKER]
    return children.start(name, argv)


def _restart(side: str) -> float:
    with Children() as children:
        agent = _start(children, side)
        workers = first_lines(children, 2)
        if side == _AUTO:
            _await_copies(agent)
        return after_a_kill(children, workers)


def _await_copies(agent: Child) -> None:
    """Return when a zygote and two copies of it wait. Raises BenchError."""
    deadline = time.monotonic() + _AUTO_TIMEOUT
    while sum(map(is_zygote, descendants(agent.pid))) < 3:
        if time.monotonic() > deadline:
            raise BenchError(f"nothing is preloaded within {_AUTO_TIMEOUT:.0f} s")
        time.sleep(0.1)
    time.sleep(_SETTLE)


def _memory(side: str) -> tuple[float, float]:
    """MB of the workers and of what they are forked from, and of the latter alone; pages by share."""
    with Children() as children:
        agent = _start(children, side)
        workers = first_lines(children, 2)
        time.sleep(_SETTLE)
        zygotes = [pid for pid in descendants(agent.pid) if is_zygote(pid)]
        if side == OURS and not zygotes:
            raise BenchError(f"no process below the agent is called {_NAME}")
        return _pss([*zygotes, *_pids(workers)]), _pss(zygotes)


def _pids(workers: list[Worker]) -> list[int]:
    return [worker.pid for worker in workers]


def is_zygote(pid: int) -> bool:
    """Whether workers are forked from this process."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip() == _NAME
    except FileNotFoundError:
        return False


def _pss(pids: list[int]) -> float:
    """The memory of processes in MB (10^6 bytes), shared pages counted by share."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
                (size,) = _PSS.findall(file.read())
        except (FileNotFoundError, ProcessLookupError):
            raise BenchError(f"process {pid} ended while its memory was read") from None
        total += int(size) * 1024
    return total / 1e6


CASE = Case("preload", "restart of workers that import torch, forked", _run)
