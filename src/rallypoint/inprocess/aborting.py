"""What makes calls that wait for other workers return when the round has ended: hooks, among them those for torch."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

from rallypoint.inprocess import torch_groups

_hooks: list[Callable[[], None]] = []


def on_round_end(abort: Callable[[], None]) -> Callable[[], None]:
    """Have `abort` called when a round ends, to break off what waits for other workers; torch's groups are known.

    It is called on another thread while the function still runs, again from time to time until that has come out, and
    once more then. So it must do no harm if nothing waits. What it raises is logged. Can be used as a decorator.
    """
    _hooks.append(abort)
    return abort


class Aborting:
    """Runs all hooks on a thread of its own, one run at a time."""

    def __init__(self) -> None:
        self._thread: Thread | None = None

    def start(self) -> None:
        """Begin, unless a run is under way."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = Thread(target=run_hooks, name="rallypoint-abort", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Until no hook runs."""
        if self._thread is not None:
            self._thread.join()


def run_hooks() -> None:
    """Break off whatever waits for other workers."""
    for hook in (torch_groups.abort, *_hooks):
        try:
            hook()
        except Exception:
            from logging import getLogger

            getLogger(__name__).warning("a hook for the end of a round has failed", exc_info=True)
