"""Equal lines of several workers, shown once (`--tee-collapse`).

`LineGroups` is pure: lines and `now` in, lines with their ranks out. Laws:

1. No line is lost or shown twice: each is in one group, with its rank.
2. The lines of one source keep their order.
3. No line waits longer than the set time, or while more than `_MOST_WAITING` bytes wait. An unfinished line, such as a
   prompt, arrives when a tee shows it, and waits like any other line, because several ranks can show the same prompt.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from operator import attrgetter

from rallypoint.base.light_typing import TYPE_CHECKING, NamedTuple
from rallypoint.base.log import ranges

if TYPE_CHECKING:
    from rallypoint.workers.logs.console import Chunk, ConsoleStream

_MOST_WAITING = 1024 * 1024
_LONGEST_LINE = 64 * 1024
"""Maximum bytes per line; a longer line is shown in parts that are never compared."""


class Group(NamedTuple):
    """A line, with its newline, and the ranks that wrote it."""

    text: bytes
    ranks: tuple[int, ...]


class _Waiting:
    """A waiting line. `place` is its position among lines that share a rank."""

    __slots__ = ("place", "ranks", "since", "text")

    def __init__(self, place: int, text: bytes, rank: int, since: float) -> None:
        self.place = place
        self.text = text
        self.ranks = {rank}
        self.since = since


_PLACE = attrgetter("place")
_GAP = 1 << 40
"""Initial distance between places, which leaves room for many lines between them."""


class LineGroups:
    """Waiting lines of several ranks, which might equal other ranks' lines.

    A new line takes the first place after its rank's last line, so a rank's own lines come before those that it might
    still share.

    Args:
        seconds: the maximum wait of a line.
        ranks: the number of ranks; a line that all ranks wrote waits only for earlier lines.
    """

    def __init__(self, seconds: float, ranks: int) -> None:
        self._seconds = seconds
        self._ranks = ranks
        self._order: list[_Waiting] = []
        self._by_age: deque[_Waiting] = deque()
        """The waiting lines by age; entries already shown have no ranks left."""
        self._by_text: dict[bytes, list[_Waiting]] = {}
        self._last: dict[int, _Waiting] = {}
        """The last waiting line of each rank."""
        self.waiting = 0
        """Bytes of the waiting lines."""

    def add(self, rank: int, text: bytes, now: float) -> None:
        last = self._last.get(rank)
        same = (group for group in self._by_text.get(text, ()) if last is None or group.place > last.place)
        group = min(same, key=_PLACE, default=None)
        if group is None:
            group = self._insert(last, text, rank, now)
        group.ranks.add(rank)
        self._last[rank] = group

    def due(self, now: float) -> list[Group]:
        out: list[Group] = []
        while self._order:
            if len(self._order[0].ranks) == self._ranks:
                out.append(self._take(self._order[0]))
            elif now >= self._oldest().since + self._seconds or self.waiting > _MOST_WAITING:
                out += [self._take(group) for group in self._up_to(self._oldest())]
            else:
                break
        return out

    def flush(self) -> list[Group]:
        out: list[Group] = []
        while self._order:
            out += [self._take(group) for group in self._up_to(self._oldest())]
        return out

    def deadline(self) -> float | None:
        return self._oldest().since + self._seconds if self._order else None

    def _insert(self, last: _Waiting | None, text: bytes, rank: int, now: float) -> _Waiting:
        at = 0 if last is None else bisect_left(self._order, last.place, key=_PLACE) + 1
        if 0 < at < len(self._order) and self._order[at].place - self._order[at - 1].place < 2:
            for number, group in enumerate(self._order):
                group.place = number * _GAP
        if not self._order:
            place = 0
        elif at == 0:
            place = self._order[0].place - _GAP
        elif at == len(self._order):
            place = self._order[-1].place + _GAP
        else:
            place = (self._order[at - 1].place + self._order[at].place) // 2
        group = _Waiting(place, text, rank, now)
        self._order.insert(at, group)
        self._by_age.append(group)
        self._by_text.setdefault(text, []).append(group)
        self.waiting += len(text)
        return group

    def _oldest(self) -> _Waiting:
        while not self._by_age[0].ranks:
            self._by_age.popleft()
        return self._by_age[0]

    def _up_to(self, group: _Waiting) -> list[_Waiting]:
        """Lines to show up to this one: first the earlier lines of its ranks, and recursively theirs."""
        needed, ranks = [group], set(group.ranks)
        for earlier in reversed(self._order[: bisect_left(self._order, group.place, key=_PLACE)]):
            if not ranks.isdisjoint(earlier.ranks):
                needed.append(earlier)
                ranks |= earlier.ranks
        return needed[::-1]

    def _take(self, group: _Waiting) -> Group:
        del self._order[bisect_left(self._order, group.place, key=_PLACE)]
        same = self._by_text[group.text]
        same.remove(group)
        if not same:
            del self._by_text[group.text]
        for rank in group.ranks:
            if self._last.get(rank) is group:
                del self._last[rank]
        self.waiting -= len(group.text)
        taken = Group(group.text, tuple(sorted(group.ranks)))
        group.ranks = set()
        return taken


class CollapsingSink:
    """One console stream with several workers' collapsed lines. For the sink's thread only.

    Args:
        seconds: time within which lines are collapsed.
        stream: where to write lines.
        ranks: local rank to global rank.
        prefixes: by local rank, the text before a line that only one worker wrote.
        sources: local ranks of the workers whose lines arrive here.
    """

    def __init__(
        self,
        seconds: float,
        stream: ConsoleStream,
        ranks: Mapping[int, int],
        prefixes: Mapping[int, str],
        sources: Sequence[int],
    ) -> None:
        self.stream = stream
        self._ranks = dict(ranks)
        self._prefixes = {local: os.fsencode(prefix) for local, prefix in prefixes.items()}
        host = f"{os.uname().nodename}: "  # as in `specs.with_host`
        self._label = os.fsencode(host if all(prefix.startswith(host) for prefix in prefixes.values()) else "")
        self.groups = LineGroups(seconds, len(sources))

    def source(self, local_rank: int) -> CollapsedStream:
        return CollapsedStream(self, local_rank, self._prefixes.get(local_rank, b""))

    def relabel(self, local_rank: int, prefix: str, rank: int | None) -> bytes:
        if rank is not None:
            self._ranks[local_rank] = rank
        found = self._prefixes[local_rank] = os.fsencode(prefix)
        return found

    def write_due(self, now: float) -> None:
        self._show(self.groups.due(now), now)

    def deadline(self) -> float | None:
        return self.groups.deadline()

    def flush(self, now: float) -> None:
        self._show(self.groups.flush(), now)

    def _show(self, groups: Sequence[Group], now: float) -> None:
        lines = b"".join(self._prefix(group.ranks) + group.text for group in groups)
        if lines:
            self.stream.write_or_queue(lines, now)

    def _prefix(self, ranks: tuple[int, ...]) -> bytes:
        if len(ranks) == 1:
            return self._prefixes.get(ranks[0], b"")
        return self._label + f"[{', '.join(ranges(sorted(self._ranks[rank] for rank in ranks)))}]: ".encode()


class CollapsedStream:
    """One worker's stream on a `CollapsingSink`, in place of a followed file's `ConsoleStream` with an empty prefix."""

    def __init__(self, sink: CollapsingSink, local_rank: int, prefix: bytes) -> None:
        self._sink = sink
        self._rank = local_rank
        self._own_prefix = prefix
        self._line = bytearray()
        self._long = False
        """Whether the unfinished line is shown in parts."""

    def write_or_queue(self, data: bytes, now: float) -> None:
        for part in _lines(data):
            self._take(part, now)
        if not self._long:  # no text goes into the middle of a line
            self._sink.write_due(now)

    def write_or_queue_chunk(self, chunk: Chunk, now: float) -> None:
        self.write_or_queue(b"".join(chunk.parts), now)

    def relabel(self, prefix: str, rank: int | None = None) -> None:
        """Set another prefix for lines that only this worker wrote, and its new global rank, if set."""
        self._own_prefix = self._sink.relabel(self._rank, prefix, rank)

    def backlog(self) -> int:
        return self._sink.stream.backlog()

    def _take(self, part: bytes, now: float) -> None:
        self._line += part
        ended = part.endswith(b"\n")
        if len(self._line) > _LONGEST_LINE or self._long:
            if not self._long:  # earlier lines go first
                self._sink.flush(now)
                self._sink.stream.write_or_queue(self._own_prefix, now)
            self._sink.stream.write_or_queue(bytes(self._line), now)
            self._long = not ended
            self._line.clear()
        elif ended:
            self._sink.groups.add(self._rank, bytes(self._line), now)
            self._line.clear()


def _lines(data: bytes) -> list[bytes]:
    """Split data into lines at newlines only."""
    parts = data.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])
