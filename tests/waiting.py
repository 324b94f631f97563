"""Waits for conditions that nothing announces, by polling; raises AssertionError after the deadline."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def until(
    holds: Callable[[], T | None], what: str | Callable[[], str] = "what it waits for", seconds: float = 120.0
) -> T:
    """Wait until something holds, which `what` says in words; returns what `holds` has returned."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, f"after {seconds:.1f} s still not: {what() if callable(what) else what}"
        threading.Event().wait(0.01)
    return found


def until_stopped(pid: int) -> None:
    """Wait until no thread runs any more of a child that was sent SIGSTOP, or until it has ended.

    `kill` returns before all threads of the process have stopped, and until then they answer.
    """
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def in_thread(work: Callable[[], T]) -> Callable[[], T]:
    """Start a function on a thread; returns a function that waits for its result."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return lambda: result.result(120)


def at_once(*works: Callable[[], T]) -> list[T]:
    """Run functions on threads at the same time; returns their results."""
    return [wait() for wait in [in_thread(work) for work in works]]
