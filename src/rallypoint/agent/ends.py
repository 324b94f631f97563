"""What to say about workers that all exited with 0 when they were stopped. Imported when the first workers run.

Such workers have saved, but most often not finished: their job continues when another node has joined. Only a person
knows whether one will, and whether anything is left to do.
"""

from __future__ import annotations

from rallypoint.workers.context import PContext

WAITING_IN_VAIN = (
    "; all ranks on this node exited with code 0: if no work is left, run 'rallyctl stop' instead of waiting for "
    "another node"
)
"""Follows the line that says what a node waits for."""


def ended_with_0(context: PContext | None, workers: int) -> bool:
    """Whether all of this number of workers have ended, with exit code 0."""
    codes = [] if context is None else [*context.exit_codes.values()]
    return bool(codes) and len(codes) == workers and not any(codes)
