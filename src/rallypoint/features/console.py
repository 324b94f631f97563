"""Finds workers that wait for a console that nobody reads."""

from __future__ import annotations

from rallypoint.base.light_typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rallypoint.workers.context import PContext

_FULL = 32 * 1024
"""A relay's pipe with at least this many bytes may be full, so that the worker waits: it has 64 KiB in pages, each
perhaps only a little more than half full, since a line is not split between two pages.
"""


def waiting_for_console(context: PContext) -> tuple[int, ...]:
    """Local ranks of the workers that cannot write until somebody reads the console."""
    relays = ((rank, context.relay(rank, stream)) for rank in context.pids() for stream in (0, 1))
    return tuple(sorted({rank for rank, relay in relays if relay is not None and relay.unread() >= _FULL}))
