"""A launcher and two workers: `--help`, the first line of the last worker, and that after a worker's SIGKILL."""

from __future__ import annotations

import subprocess
import time
from functools import partial

from benchmarks.case import OURS, THEIRS, BenchError, Budget, Case, Row, Settings, in_turn, row
from benchmarks.children import ROOT, Children, clean_environment, launcher
from benchmarks.jobs import after_a_kill, first_lines, start_pair, start_single

_LIMIT = 60.0  # seconds


def _run_help(settings: Settings) -> list[Row]:
    sides = {OURS: lambda: _help("rallyrun"), THEIRS: lambda: _help("torchrun")}
    turns = in_turn("--help", settings.rounds, sides, warm_up=True)
    return [row("--help, whole process", "s", turns, Budget(0.02))]


def _help(name: str) -> float:
    argv = [launcher(name), "--help"]
    begin = time.perf_counter()
    done = subprocess.run(argv, cwd=ROOT, env=clean_environment(), capture_output=True, timeout=_LIMIT, check=False)
    taken = time.perf_counter() - begin
    if done.returncode or not done.stdout.startswith(b"usage"):
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise BenchError(f"{name} --help ended with exit code {done.returncode}: {' '.join(last)}")
    return taken


def _run_start(settings: Settings) -> list[Row]:
    turns = in_turn("start", settings.rounds, {side: partial(_start, side) for side in (OURS, THEIRS)}, warm_up=True)
    return [row("command to first line of the last of 2 workers", "s", turns, Budget(0.06))]


def _start(side: str) -> float:
    with Children() as children:
        agent = start_single(children, side)
        return max(worker.at for worker in first_lines(children, 2)) - agent.started


def _run_restart(settings: Settings) -> list[Row]:
    turns = in_turn("restart", settings.rounds, {side: partial(_restart, side) for side in (OURS, THEIRS)})
    return [row("worker SIGKILL to restarted workers' first line, one node", "s", turns, Budget(0.06))]


def _restart(side: str) -> float:
    with Children() as children:
        start_single(children, side)
        return after_a_kill(children, first_lines(children, 2))


def _run_restart_of_pair(settings: Settings) -> list[Row]:
    turns = in_turn("restart over 2 nodes", settings.rounds, {side: partial(_pair, side) for side in (OURS, THEIRS)})
    return [row("the same over two nodes", "s", turns, Budget(0.010))]


def _pair(side: str) -> float:
    with Children() as children:
        start_pair(children, side)
        return after_a_kill(children, first_lines(children, 2))


HELP = Case("help", "--help, whole process", _run_help, rounds=5)
START = Case("start", "command to the first line of the last of 2 workers", _run_start, rounds=5)
RESTART = Case("restart", "worker SIGKILL to restarted workers' first line, one node", _run_restart, rounds=5)
RESTART_OF_PAIR = Case("restart-2-nodes", "the same over two nodes on loopback", _run_restart_of_pair)
