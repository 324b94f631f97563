"""Finds workers that are blocked because nobody reads the console."""

from __future__ import annotations

from rallypoint.base.light_typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rallypoint.workers.context import PContext

_FULL = 32 * 1024
"""Minimum number of bytes in a relay's pipe that may be full, so that the worker blocks. The pipe has 64 KiB in pages.
Each may be only a little more than half full, since no line is split between pages.
"""


def waiting_for_console(context: PContext) -> tuple[int, ...]:
    """Local ranks of workers that cannot write until somebody reads the console."""
    relays = ((rank, context.relay(rank, stream)) for rank in context.pids() for stream in (0, 1))
    return tuple(sorted({rank for rank, relay in relays if relay is not None and relay.unread() >= _FULL}))
