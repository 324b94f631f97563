"""Whose turn it is to write to a console that several workers share. Pure: bytes and `now` in, bytes to write out.

Laws:
- nothing is lost, changed or reordered within one source;
- what can be shown is shown at once: a prompt or a progress bar without a newline does not wait for one;
- a source that stands in the middle of a line keeps the console until its newline. Another takes it only when the
  source has been silent for `quiet` seconds, or when it has kept the other waiting for `patience` seconds;
- nobody starves: while others wait, a source gives the console away at the end of a line.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)

MAX_SILENCE = 0.1
MAX_WAIT = 0.5


class _Queued:
    __slots__ = ("data", "since")

    def __init__(self, data: bytes, since: float) -> None:
        self.data = bytearray(data)
        self.since = since


class LineScheduler(Generic[S]):
    """The turn of one console. Every method that may give it on returns what is to be written, in order."""

    def __init__(self, quiet: float = MAX_SILENCE, patience: float = MAX_WAIT) -> None:
        self._max_silence = quiet
        self._max_wait = patience
        self._holder: S | None = None  # stands in the middle of a line
        self._held_since = 0.0
        self._last_bytes = 0.0  # when the holder was last heard
        self._waiting: dict[S, _Queued] = {}  # first come, first served

    def write_or_queue(self, source: S, data: bytes, now: float) -> list[tuple[S, bytes]]:
        """`source` has said `data` (not empty)."""
        if self.may_write(source):  # what `tick` would do, without its copies
            self.wrote(source, data.endswith(b"\n"), now)
            return [(source, data)]
        if (queued := self._waiting.get(source)) is not None:
            queued.data += data
        else:
            self._waiting[source] = _Queued(data, now)
        return self.due_output(now)

    def may_write(self, source: S) -> bool:
        """Whether `source` may write at once, and then call `spoken`."""
        return not self._waiting and self._holder in (None, source)

    def wrote(self, source: S, ends: bool, now: float) -> None:
        """`source`, which was free to, has written something; `ends` if that ended a line."""
        if self._holder is None:
            self._held_since = now
        self._note_output(source, ends, now)

    def due_output(self, now: float) -> list[tuple[S, bytes]]:
        """What may be written now that time has passed. Call it when `deadline` has come."""
        out: list[tuple[S, bytes]] = []
        while self._waiting:
            if self._holder is None or (self._holder not in self._waiting and self._must_yield(now)):
                self._holder = next(iter(self._waiting))
                self._held_since = now
            if self._holder not in self._waiting:
                break
            out.append((self._holder, self._take_output(self._holder, now)))
        return out

    def flush(self) -> list[tuple[S, bytes]]:
        """All that is left, turns or not: the holder's first, so that its line ends."""
        out = []
        if self._holder is not None and (own := self._waiting.pop(self._holder, None)):
            out.append((self._holder, bytes(own.data)))
        out += [(source, bytes(waiting.data)) for source, waiting in self._waiting.items()]
        self._waiting.clear()
        self._holder = None
        return out

    def backlog(self, source: S) -> int:
        """How many bytes of `source` wait. Who feeds it should pause while this is large."""
        waiting = self._waiting.get(source)
        return len(waiting.data) if waiting else 0

    def deadline(self) -> float | None:
        """When `tick` is due, on the clock of `now`; None while nobody waits."""
        for first in self._waiting.values():
            return min(self._last_bytes + self._max_silence, max(first.since, self._held_since) + self._max_wait)
        return None

    def _must_yield(self, now: float) -> bool:
        deadline = self.deadline()
        return deadline is not None and now >= deadline

    def _take_output(self, source: S, now: float) -> bytes:
        """Take out what `source` may say in its turn, and leave the turn where it belongs afterwards."""
        data = bytes(self._waiting.pop(source).data)
        whole = data.rfind(b"\n") + 1
        if whole and self._waiting and whole < len(data):
            self._waiting[source] = _Queued(data[whole:], now)  # the next line, behind those who wait already
            data = data[:whole]
        self._note_output(source, data.endswith(b"\n"), now)
        return data

    def _note_output(self, source: S, ends: bool, now: float) -> None:
        """`source` says something, and keeps the turn if that does not end a line."""
        self._holder = None if ends else source
        self._last_bytes = now
