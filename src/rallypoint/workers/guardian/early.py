"""A guardian that is started ahead of the agent that will use it, so that it gets ready beside the imports.

One is kept here at most; whoever takes it owns it. If nobody does, it ends with this process.
"""

from __future__ import annotations

import os

from rallypoint.base.errors import RallypointError
from rallypoint.workers.guardian.client import Guardian

_waiting: Guardian | None = None


def begin() -> None:
    """Start one for the next `take`. A failure is not told here: the agent will try again, and tell."""
    global _waiting
    if _waiting is None:
        try:
            _waiting = Guardian()
        except RallypointError:
            return


def take() -> Guardian:
    """The one that was started ahead, else a new one. Raises as `Guardian` does."""
    global _waiting
    taken, _waiting = _waiting, None
    if taken is not None and taken.lost:
        taken.close()
        taken = None
    return taken or Guardian()


def _begin_anew() -> None:
    """It is the original's, not that of a copy of the process."""
    global _waiting
    _waiting = None


os.register_at_fork(after_in_child=_begin_anew)
