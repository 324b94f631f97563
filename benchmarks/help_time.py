"""`--help`, the whole process: from its start to its end."""

from __future__ import annotations

import subprocess
import time

from benchmarks.case import OURS, THEIRS, Case, Settings, row
from benchmarks.children import ROOT, clean_environment, launcher
from benchmarks.errors import BenchError
from benchmarks.table import Budget, Row
from benchmarks.turns import in_turn

_LIMIT = 60.0  # seconds


def _run(settings: Settings) -> list[Row]:
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


CASE = Case("help", "--help, whole process", _run, rounds=5)
