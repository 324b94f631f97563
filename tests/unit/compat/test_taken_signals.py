"""Signal handlers of a process that starts workers by itself, and their restoration."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rallypoint.base.signals import post_signals
from rallypoint.compat.processes import SubprocessContext, start_processes
from rallypoint.workers.context import PContext
from rallypoint.workers.logs.specs import DefaultLogsSpecs

pytestmark = pytest.mark.process

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in NUMBERS]


@contextmanager
def started(folder: Path) -> Iterator[PContext]:
    args = {0: ("-c", "import time; time.sleep(600)")}
    context = start_processes("n", sys.executable, args, {0: {}}, DefaultLogsSpecs(log_dir=str(folder)))
    try:
        yield context
    finally:
        context.close(signal.SIGKILL)


def test_the_last_of_two_restores_the_handlers(tmp_path: Path) -> None:
    before = handlers()
    with started(tmp_path) as first, started(tmp_path) as second:
        assert isinstance(first, SubprocessContext)
        taken = handlers()
        assert all(callable(handler) and handler not in before for handler in taken)
        first.close(signal.SIGKILL)
        assert handlers() == taken
        second.close(signal.SIGKILL)
        assert handlers() == before


def test_newer_handlers_are_kept(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGHUP)
    try:
        with started(tmp_path):
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_failed_start_and_a_thread_take_no_signals(tmp_path: Path) -> None:
    before, seen = handlers(), []
    with pytest.raises(ValueError, match="nowhere"):
        start_processes("n", "/nowhere", {0: ()}, {0: {}}, DefaultLogsSpecs(log_dir=str(tmp_path)))
    assert handlers() == before

    def run() -> None:
        with started(tmp_path):
            seen.extend(handlers())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == before


def test_an_agent_keeps_its_handlers(tmp_path: Path) -> None:
    posted: list[int] = []
    with post_signals(posted.append, [signal.SIGHUP]), started(tmp_path):
        signal.raise_signal(signal.SIGHUP)
    assert posted == [signal.SIGHUP]
