"""Decides which of several workers may write to a console that they share. Pure: bytes and `now` in, bytes to write
out.

Laws:
- nothing is lost, changed or reordered within one source;
- what may be written is written at once: a prompt or a progress bar without a newline does not wait for one;
- a source that has not ended its line keeps the console until its newline. Another gets it only when the source was
  silent for `MAX_SILENCE` seconds, or has kept the other waiting for `MAX_WAIT` seconds;
- no source starves: while others wait, a source gives the console up at the end of a line.
"""

from __future__ import annotations

from collections.abc import Hashable

from rallypoint.base.light_typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)

MAX_SILENCE, MAX_WAIT = 0.1, 0.5


class _Queued:
    __slots__ = ("data", "since")

    def __init__(self, data: bytes, since: float) -> None:
        self.data = bytearray(data)
        self.since = since


class LineScheduler(Generic[S]):
    """The schedule of one console. Methods that may pass it on return what is to be written, in order."""

    def __init__(self) -> None:
        self._holder: S | None = None  # has not ended its line
        self._held_since = 0.0
        self._last_bytes = 0.0  # when the holder last wrote
        self._waiting: dict[S, _Queued] = {}  # first come, first served

    def write_or_queue(self, source: S, data: bytes, now: float) -> list[tuple[S, bytes]]:
        """`source` has `data` (not empty) to write."""
        if self.may_write(source):  # as `due_output` does, but without a copy
            self.wrote(source, data.endswith(b"\n"), now)
            return [(source, data)]
        if (queued := self._waiting.get(source)) is not None:
            queued.data += data
        else:
            self._waiting[source] = _Queued(data, now)
        return self.due_output(now)

    def may_write(self, source: S) -> bool:
        """Whether `source` may write at once, and then call `wrote`."""
        return not self._waiting and self._holder in (None, source)

    def wrote(self, source: S, ends: bool, now: float) -> None:
        """`source` has written at once; `ends` if that ended a line."""
        if self._holder is None:
            self._held_since = now
        self._note_output(source, ends, now)

    def due_output(self, now: float) -> list[tuple[S, bytes]]:
        """What may be written at `now`. Call it when `deadline` has passed."""
        out: list[tuple[S, bytes]] = []
        while self._waiting:
            deadline = self.deadline()
            yields = deadline is not None and now >= deadline
            if self._holder is None or (self._holder not in self._waiting and yields):
                self._holder = next(iter(self._waiting))
                self._held_since = now
            if self._holder not in self._waiting:
                break
            out.append((self._holder, self._take_output(self._holder, now)))
        return out

    def flush(self) -> list[tuple[S, bytes]]:
        """All that is left, the holder's first, so that its line ends."""
        out = []
        if self._holder is not None and (own := self._waiting.pop(self._holder, None)):
            out.append((self._holder, bytes(own.data)))
        out += [(source, bytes(waiting.data)) for source, waiting in self._waiting.items()]
        self._waiting.clear()
        self._holder = None
        return out

    def backlog(self, source: S) -> int:
        """Bytes of `source` that wait. Its reader should pause while this is large."""
        waiting = self._waiting.get(source)
        return len(waiting.data) if waiting else 0

    def deadline(self) -> float | None:
        """When to call `due_output`, on the clock of `now`; None while no source waits."""
        for first in self._waiting.values():
            return min(self._last_bytes + MAX_SILENCE, max(first.since, self._held_since) + MAX_WAIT)
        return None

    def _take_output(self, source: S, now: float) -> bytes:
        """Take the output that `source` may write now, and pass the console on if a line ends."""
        data = bytes(self._waiting.pop(source).data)
        whole = data.rfind(b"\n") + 1
        if whole and self._waiting and whole < len(data):
            self._waiting[source] = _Queued(data[whole:], now)  # the next line, behind those who wait already
            data = data[:whole]
        self._note_output(source, data.endswith(b"\n"), now)
        return data

    def _note_output(self, source: S, ends: bool, now: float) -> None:
        """`source` writes, and keeps the console if that does not end a line."""
        self._holder = None if ends else source
        self._last_bytes = now
