"""What to log about workers that all exited with 0 when they were stopped. Imported when the first workers run.

Such workers have saved, but most often not finished: their job continues when another node joins. Only a person knows
whether one will join, and whether any work is left.
"""

from __future__ import annotations

from rallypoint.workers.context import PContext

WAITING_IN_VAIN = (
    "; all ranks on this node exited with code 0: if no work is left, run 'rallyctl stop' instead of waiting for "
    "another node"
)
"""Text after the line that says what a node is waiting for."""


def ended_with_0(context: PContext | None, workers: int) -> bool:
    """Whether exactly this many workers ended, all with exit code 0."""
    codes = [] if context is None else [*context.exit_codes.values()]
    return bool(codes) and len(codes) == workers and not any(codes)
