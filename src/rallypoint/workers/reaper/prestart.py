"""A reaper that is started ahead of the agent that will use it, so that it gets ready beside the imports.

At most one is kept here; the caller of `take_prestarted` owns it. If there is none, it ends with this process.
"""

from __future__ import annotations

import os

from rallypoint.base.errors import RallypointError
from rallypoint.workers.reaper.client import ReaperClient

_prestarted: ReaperClient | None = None


def prestart() -> None:
    """Start one for the next `take`. A failure is not reported here: the agent tries again, and reports it."""
    global _prestarted
    if _prestarted is None:
        try:
            _prestarted = ReaperClient()
        except RallypointError:
            return


def take_prestarted() -> ReaperClient:
    """Return the reaper that was started ahead, else a new one. Raises as `ReaperClient` does."""
    global _prestarted
    taken, _prestarted = _prestarted, None
    if taken is not None and taken.lost:
        taken.close()
        taken = None
    return taken or ReaperClient()


def _reset_after_fork() -> None:
    """Forget the reaper in a forked process: it belongs to the original."""
    global _prestarted
    _prestarted = None


os.register_at_fork(after_in_child=_reset_after_fork)
