"""Helpers that start workers, and processes that tests control."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from rallypoint.workers.context import PContext, ProcessOptions, RunProcsResult, SubprocessContext
from rallypoint.workers.functions.context import FunctionContext
from rallypoint.workers.logs.specs import DefaultLogsSpecs, LogsSpecs, Std
from rallypoint.workers.process import WorkerProcess
from tests.interrupts import Interrupted
from tests.unit.workers.test_process import TIMEOUT

Up = Callable[..., WorkerProcess]


def start_processes(
    entrypoint: Callable[..., Any] | str,
    args: Mapping[int, Sequence[Any]],
    envs: Mapping[int, Mapping[str, str]],
    specs: LogsSpecs,
    start_method: str = "spawn",
) -> PContext:
    """Start a context of a program or a function."""
    options = ProcessOptions(start_method=start_method)
    kind: type[PContext] = SubprocessContext if isinstance(entrypoint, str) else FunctionContext
    context = kind("group", entrypoint, args, envs, specs, options=options)
    context.start()
    return context


@contextmanager
def running(
    folder: Path,
    entrypoint: Callable[..., Any] | str,
    args: Mapping[int, Sequence[Any]],
    env: Mapping[str, str] = {},
    method: str = "spawn",
) -> Iterator[PContext]:
    """Workers with both streams in files, which are killed at the end."""
    specs = DefaultLogsSpecs(str(folder), redirects=Std.ALL)
    context = start_processes(entrypoint, args, dict.fromkeys(args, env), specs, method)
    try:
        yield context
    finally:
        context.close(signal.SIGKILL)


def waited(context: PContext) -> RunProcsResult:
    """The result of all workers."""
    result = context.wait(TIMEOUT)
    assert result is not None
    return result


def descriptors() -> set[str]:
    """Those of this process, except for the one that libffi keeps from the first callback."""
    found = set[str]()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of this list
            if "libffi" not in os.readlink(f"/proc/self/fd/{number}"):
                found.add(number)
    return found


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """A signal handler raises an exception in this block."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    former = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with pytest.raises(Interrupted):
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


class Script:
    """A Python process that executes lines, one by one."""

    def __init__(self, folder: Path) -> None:
        code = "import os, subprocess, sys\nfor line in sys.stdin:\n    exec(line)\n    print(flush=True)\n"
        with open(folder / "stderr", "wb") as errors:  # a file, as it may be for a worker
            self.process = subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
            )
        self.pid = self.process.pid

    def run(self, line: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        assert self.process.stdout.readline() == "\n"
