"""Waits for the events of a watch."""

from __future__ import annotations

import queue
from collections.abc import Sequence

from rallypoint.control.etcd.api import WatchEnd, WatchEvent

TIMEOUT = 120.0
"""Seconds after which a test gives up."""


class Told:
    """Takes both callbacks of a watch."""

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[WatchEvent | WatchEnd] = queue.SimpleQueue()

    def on_events(self, events: Sequence[WatchEvent]) -> None:
        for event in events:
            self._told.put(event)

    def on_lost(self, lost: WatchEnd) -> None:
        self._told.put(lost)

    def next(self) -> WatchEvent | WatchEnd:
        """What is told next."""
        return self._told.get(timeout=TIMEOUT)

    def event(self) -> WatchEvent:
        """What is told next, which is an event."""
        told = self.next()
        assert isinstance(told, WatchEvent), told
        return told

    def events(self, count: int) -> list[WatchEvent]:
        """So many of them."""
        return [self.event() for _ in range(count)]

    def lost(self) -> WatchEnd:
        """What is told next, which is the end."""
        told = self.next()
        assert not isinstance(told, WatchEvent), told
        return told

    @property
    def silent(self) -> bool:
        """Whether all that was told has been taken."""
        return self._told.empty()
