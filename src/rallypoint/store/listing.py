"""The table's parts, and lists of all keys that are made part by part while keys come and go. Pure.

A list has the keys as they were when it was asked for. It keeps no names of parts that have not changed since: before
one does, all lists that have still to send it are given its names, one copy for all of them. So a thousand lists that
are not read cost next to nothing, and no client waits for another's list.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from rallypoint.store.wire import I64, string

SHARDS = 1024
"""Parts of a table. What must be done to all keys is done part by part: of a million keys each has a thousand."""
MASK = SHARDS - 1

_AT_ONCE, _PIECE = 64, 16 * 1024
"""Parts, and about how many bytes, that are sent in one step; if one part is more, it is sent alone."""

Shards: TypeAlias = "list[dict[bytes, bytes | bytearray]]"
"""The values; a key is in the part that the lowest bits of its hash say."""


class KeyListings:
    """All lists that are being made over these parts."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._open: dict[int, _KeyListing] = {}
        self._number = 0
        self._last_snapshot = [0] * SHARDS  # for each part the last list that was given its names
        self.any_open = False
        """Whether there are any, so that `keep_snapshot` must be called."""

    def names(self) -> Iterator[bytes]:
        """All keys as they are at the first step, as they travel: their number, and then piece by piece."""
        self._number += 1
        listing = self._open[self._number] = _KeyListing(self._number)
        self.any_open = True
        try:
            piece = I64.pack(sum(map(len, self._shards)))
            while listing.at < SHARDS:
                for _ in range(_AT_ONCE):
                    piece += self._next(listing)
                    if len(piece) >= _PIECE or listing.at == SHARDS:
                        break
                yield piece
                piece = b""
        finally:
            del self._open[listing.number]
            self.any_open = bool(self._open)

    def _next(self, listing: _KeyListing) -> bytes:
        index = listing.at
        listing.at += 1
        kept = listing.snapshots.pop(index, None)
        return kept if kept is not None else _names(self._shards[index])

    def keep_snapshot(self, index: int) -> None:
        """A key comes or goes in this part: lists that have still to send it are given its names before."""
        last = self._last_snapshot[index]
        if last == self._number:
            return
        self._last_snapshot[index] = self._number
        names: bytes | None = None
        for listing in reversed(self._open.values()):
            if listing.number <= last:
                break  # it and all older ones were given them before an earlier change
            if listing.at <= index:
                names = names if names is not None else _names(self._shards[index])
                listing.snapshots[index] = names


class _KeyListing:
    """One list: which part is next, and what was in those that have changed since."""

    __slots__ = ("at", "number", "snapshots")

    def __init__(self, number: int) -> None:
        self.number = number
        self.at = 0
        self.snapshots: dict[int, bytes] = {}


def _names(shard: dict[bytes, bytes | bytearray]) -> bytes:
    return b"".join(map(string, shard)) if shard else b""
