"""Waiting for the events of a watch."""

from __future__ import annotations

import queue
from collections.abc import Sequence

from rallypoint.control.etcd.api import WatchEnd, WatchEvent

TIMEOUT = 120.0
"""Seconds after which a test gives up."""


class Told:
    """Records the calls of both callbacks of a watch."""

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[WatchEvent | WatchEnd] = queue.SimpleQueue()

    def on_events(self, events: Sequence[WatchEvent]) -> None:
        for event in events:
            self._told.put(event)

    def on_lost(self, lost: WatchEnd) -> None:
        self._told.put(lost)

    def next(self) -> WatchEvent | WatchEnd:
        """The next event, or the end of the watch."""
        return self._told.get(timeout=TIMEOUT)

    def event(self) -> WatchEvent:
        """The next event."""
        told = self.next()
        assert isinstance(told, WatchEvent), told
        return told

    def events(self, count: int) -> list[WatchEvent]:
        """The next events."""
        return [self.event() for _ in range(count)]

    def lost(self) -> WatchEnd:
        """The end of the watch."""
        told = self.next()
        assert not isinstance(told, WatchEvent), told
        return told

    @property
    def silent(self) -> bool:
        """Whether nothing more was delivered."""
        return self._told.empty()
