"""Hooks that make calls which wait for other workers return when the round has ended, those for torch among them."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

from rallypoint.inprocess import torch_groups

_hooks: list[Callable[[], None]] = []


def on_round_end(abort: Callable[[], None]) -> Callable[[], None]:
    """Call `abort` when a round ends, to abort whatever waits for other workers; torch's groups need no hook.

    It is called on another thread while the function still runs, repeatedly until the function has ended, and once more
    after that. So it must do no harm if nothing waits. What it raises is logged. Can be used as a decorator.
    """
    _hooks.append(abort)
    return abort


class Aborting:
    """Runs all hooks on a thread of its own, one run at a time."""

    def __init__(self) -> None:
        self._thread: Thread | None = None

    def start(self) -> None:
        """Begin a run, unless one is in progress."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = Thread(target=run_hooks, name="rallypoint-abort", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until no hook runs."""
        if self._thread is not None:
            self._thread.join()


def run_hooks() -> None:
    """Abort whatever waits for other workers."""
    for hook in (torch_groups.abort, *_hooks):
        try:
            hook()
        except Exception:
            from logging import getLogger

            getLogger(__name__).warning("a hook for the end of a round has failed", exc_info=True)
