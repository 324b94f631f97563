"""What is said of workers that have all ended with 0 when they were stopped. Imported once the first ones run.

Such workers have saved, and most often not finished: their job continues when another node has come. Only a person
knows whether one will, and whether anything is left to do.
"""

from __future__ import annotations

from rallypoint.workers.context import PContext

WAITING_IN_VAIN = (
    "; all ranks of this node have ended with 0: if nothing is left to run, end the job with 'rallyctl stop' "
    "instead of waiting for a node"
)
"""Follows the line on what a node waits for."""


def ended_with_0(context: PContext | None, workers: int) -> bool:
    """Whether there were so many workers, and all have ended with exit code 0."""
    codes = [] if context is None else [*context.exit_codes.values()]
    return bool(codes) and len(codes) == workers and not any(codes)
