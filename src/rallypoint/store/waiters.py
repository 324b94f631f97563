"""Tracks which clients wait for which keys. Pure.

- **One outstanding wait for each client**: a later one takes the place of an earlier one. A client counts the keys that
  it still misses; a key named twice counts twice. It gets one reply, when the count reaches zero.
- What is cancelled is only marked, for it may stand in the lines of a hundred thousand keys; `clear` takes it out of
  them some at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)


class _Wait(Generic[C]):
    """What one client waits for."""

    __slots__ = ("client", "keys", "missing")

    def __init__(self, client: C) -> None:
        self.client: C | None = client  # None once it was cancelled
        self.missing = 1  # one more until it is settled, so that it does not end before all keys were named
        self.keys: list[bytes] = []


class Waiters(Generic[C]):
    """All who wait."""

    def __init__(self) -> None:
        self.lines: dict[bytes, dict[_Wait[C], int]] = {}
        """Who waits for a key, first come first, and how often it was named."""
        self._waits: dict[C, _Wait[C]] = {}
        self._cancelled: deque[_Wait[C]] = deque()

    def begin(self, client: C) -> None:
        """The client waits for the keys that follow, and for nothing else any more."""
        self.cancel(client)
        self._waits[client] = _Wait(client)

    def add(self, client: C, key: bytes) -> None:
        """One more key for which it waits."""
        wait = self._waits[client]
        wait.missing += 1
        wait.keys.append(key)
        line = self.lines.setdefault(key, {})
        line[wait] = line.get(wait, 0) + 1

    def end_of_keys(self, client: C) -> bool:
        """All keys were named; whether nothing is missed."""
        return self._found(self._waits[client], 1) is not None

    def cancel(self, client: C) -> None:
        """The client has left, or no longer waits."""
        wait = self._waits.pop(client, None)
        if wait is not None:
            wait.client = None
            self._cancelled.append(wait)

    def clear(self, steps: int) -> bool:
        """Forget so much of what was cancelled; whether something is left."""
        while self._cancelled:
            keys = self._cancelled[0].keys
            while keys:
                if not steps:
                    return True
                steps -= 1
                line = self.lines.get(keys[-1])
                if line is not None and line.pop(self._cancelled[0], None) is not None and not line:
                    del self.lines[keys[-1]]
                keys.pop()
            self._cancelled.popleft()
        return False

    def wake(self, key: bytes) -> list[C]:
        """The key has changed: those who waited for it miss it no longer. Returns who misses nothing now."""
        found = [self._found(wait, times) for wait, times in self.lines.pop(key, {}).items()]
        return [client for client in found if client is not None]

    def wake_first(self, key: bytes) -> list[C]:
        """The queue has grown: those who wait find it in order, until one misses nothing; that one."""
        line = self.lines.get(key, {})
        for wait, times in list(line.items()):
            del line[wait]
            if not line:
                del self.lines[key]
            client = self._found(wait, times)
            if client is not None:
                return [client]
        return []

    def _found(self, wait: _Wait[C], times: int) -> C | None:
        """So many keys have come: the client, if it is there and those were the last that it missed."""
        wait.missing -= times
        if wait.missing or wait.client is None:
            return None
        del self._waits[wait.client]
        return wait.client
