"""What many nodes are asked for on behalf of one receiver: a watcher, or the node that reports a hang. Pure.

Laws:

1. Few nodes are asked at a time, and the next one only when the receiver has read all that an earlier one has sent:
   whoever reads slowly is sent slowly, and is not cut off for that.
2. What is passed on is bounded, for each node and in all. Nodes for which nothing is left are not asked, and counted.
3. A node that does not answer in time is no longer awaited.
4. A collection that follows does not end by itself: a node is asked again when the receiver has read its answer.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from rallypoint.base.light_typing import NamedTuple
from rallypoint.control.membership.state import NodeId
from rallypoint.control.protocol.messages import CollectKind

_KIB, _MIB = 1024, 1024 * 1024
_MOST_OF_FEW = 4 * _MIB
"""Bytes of one node that are passed on if there are few nodes."""


class Limits(NamedTuple):
    """`at_once` is how many nodes are asked at a time, `seconds` what each has, `longest` what all have. Of one node so
    many bytes are passed on in any case, and so many of all.
    """

    at_once: int
    of_node: int
    of_all: int
    seconds: float
    longest: float


LIMITS: Mapping[CollectKind, Limits] = {
    CollectKind.HANG: Limits(1024, 64 * _KIB, 64 * _MIB, 15.0, 60.0),
    CollectKind.STACKS: Limits(1024, 64 * _KIB, 64 * _MIB, 30.0, 300.0),
    CollectKind.BUNDLE: Limits(32, 2 * _MIB, 256 * _MIB, 30.0, 900.0),
    CollectKind.LOGS: Limits(1024, 64 * _KIB, 64 * _MIB, 30.0, 300.0),
}
"""What is unread at a time fits into what a connection may leave unread (`control.coordinator.connection`)."""


def room_for_each(kind: CollectKind, nodes: int) -> int:
    """The bytes that are passed on of each of so many nodes."""
    limits = LIMITS[kind]
    return max(limits.of_node, min(_MOST_OF_FEW, limits.of_all // max(1, nodes)))


class Collection:
    """One collection, from the first request on.

    Args:
        kind: what is collected.
        nodes: the nodes, in the order in which they are asked.
        in_reach: whether a node can be asked now.
        ask: asks some nodes.
        now: seconds on the clock of all times.
        follows: whether nodes are asked again and again.
    """

    def __init__(
        self,
        kind: CollectKind,
        nodes: Sequence[NodeId],
        in_reach: Callable[[NodeId], bool],
        ask: Callable[[Sequence[NodeId]], None],
        now: float,
        *,
        follows: bool = False,
    ) -> None:
        self.limits = LIMITS[kind]
        self.follows = self._asks_again = follows
        self._of_node = room_for_each(kind, len(nodes))
        self._left = deque(nodes)
        self._in_reach = in_reach
        self._ask = ask
        self._until: dict[NodeId, float] = {}
        """Nodes that were asked and are not read, and until when they are awaited and hold up the next ones."""
        self._sizes: dict[NodeId, int] = {}
        """Those that have not sent all of it, and how many bytes they have."""
        self._unread: deque[NodeId] = deque()
        """Those that have, but the receiver has not read it."""
        self._size = 0
        self._is_full = False
        """Whether no more nodes are asked: there is no room for what they would send, or no time."""
        self._ends_at = math.inf if follows else now + self.limits.longest
        self.silent: list[NodeId] = []
        self.lost: list[NodeId] = []
        self.cut: dict[NodeId, None] = {}
        """Nodes that have sent too much, in order."""
        self._ask_more(now)

    def __contains__(self, node: NodeId) -> bool:
        """Whether a node was asked and has not sent all of it."""
        return node in self._sizes

    @property
    def is_over(self) -> bool:
        """Whether nothing more is expected."""
        return not self._sizes and (not self._left or self._is_full) and not self._asks_again

    @property
    def not_asked(self) -> int:
        """The number of nodes that were not asked."""
        return len(self._left)

    def pass_on(self, node: NodeId, data: bytes, is_last: bool) -> bytes:
        """A node of it has sent a part. Returns what of that is passed on."""
        size = self._sizes[node] = self._sizes[node] + len(data)
        if not self.follows:
            self._size += len(data)
        self._is_full = self._is_full or self._size > self.limits.of_all
        if size > self._of_node or self._is_full:
            self.cut[node] = None
        if is_last:
            del self._sizes[node]
            self._unread.append(node)
        return b"" if node in self.cut else data

    def on_read(self, now: float) -> None:
        """The receiver has read all of one node."""
        if self._unread:
            node = self._unread.popleft()
            self._until.pop(node, None)
            if self._asks_again:
                self._left.append(node)
            self._ask_more(now)

    def add(self, nodes: Iterable[NodeId], now: float) -> None:
        """Follow these nodes too."""
        known = {*self._left, *self._sizes, *self._unread}
        self._left.extend(node for node in nodes if node not in known)
        self._ask_more(now)

    def restart(self, node: NodeId) -> None:
        """A node is asked again, and sends all of it from the beginning."""
        self._sizes[node] = 0

    def on_resume(self, now: float) -> None:
        """A node is back: it may be one that is asked next, and was not in reach."""
        self._ask_more(now)

    def finish(self, now: float) -> None:
        """Follow no longer: whoever was asked may still answer for a while, and nobody is asked again."""
        if self._asks_again:
            self._asks_again, self._ends_at = False, now + self.limits.seconds
            self._left.clear()

    def forget(self, node: NodeId, now: float) -> None:
        """A node is gone."""
        if self._sizes.pop(node, None) is not None:
            del self._until[node]
            if not self.follows:
                self.lost.append(node)
            self._ask_more(now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._is_full = self._is_full or now >= self._ends_at
        for node in [node for node, until in self._until.items() if min(until, self._ends_at) <= now]:
            del self._until[node]
            if self._sizes.pop(node, None) is not None:
                (self._left if self._asks_again else self.silent).append(node)
        self._ask_more(now)

    def wake_at(self) -> float:
        """The time at which `tick` has something to do."""
        return min(self._ends_at, next(iter(self._until.values()), self._ends_at))

    def _ask_more(self, now: float) -> None:
        wave: list[NodeId] = []
        away: list[NodeId] = []
        while self._left and not self._is_full and len(self._until) < self.limits.at_once:
            node = self._left.popleft()
            if self._in_reach(node):
                self._until[node], self._sizes[node] = now + self.limits.seconds, 0
                wave.append(node)
            else:
                (away if self.follows else self.lost).append(node)
        self._left.extend(away)  # they may come back
        if wave:
            self._ask(wave)
