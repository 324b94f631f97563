"""A collection of data from many nodes for one receiver: a watcher, or the node that reports a hang. Pure.

Laws:

1. Only a few nodes are asked at a time, and the next one only after the receiver has read an earlier node's answer: a
   slow reader gets data slowly, and is not cut off.
2. The number of bytes passed on is limited, per node and in total. Nodes beyond that are counted, but not asked.
3. A node that does not answer in time is skipped.
4. A following collection does not end on its own: a node is asked again after the receiver has read its answer.
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
"""Maximum number of bytes to pass on per node if there are few."""


class Limits(NamedTuple):
    """`at_once` nodes are asked at a time, with `seconds` for each and `longest` for all. The rest are the bytes
    guaranteed to each node, and the maximum for all.
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
"""Unread bytes stay below a connection's limit (`control.coordinator.connection`)."""


def room_for_each(kind: CollectKind, nodes: int) -> int:
    """How many bytes to pass on from each of this many nodes."""
    limits = LIMITS[kind]
    return max(limits.of_node, min(_MOST_OF_FEW, limits.of_all // max(1, nodes)))


class Collection:
    """One collection.

    Args:
        kind: the data to collect.
        nodes: the nodes, in the order in which to ask them.
        in_reach: whether a node can be asked now.
        ask: asks some nodes.
        now: the time on the coordinator's clock, in seconds.
        follows: whether to ask nodes repeatedly.
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
        """Asked nodes whose answers are unread, and how long they can delay the next ones."""
        self._sizes: dict[NodeId, int] = {}
        """Nodes with incomplete answers, and their bytes so far."""
        self._unread: deque[NodeId] = deque()
        """Nodes with complete answers that the receiver has not read yet."""
        self._size = 0
        self._is_full = False
        """Whether room or time is used up, so that no more nodes are asked."""
        self._ends_at = math.inf if follows else now + self.limits.longest
        self.silent: list[NodeId] = []
        self.lost: list[NodeId] = []
        self.cut: dict[NodeId, None] = {}
        """Nodes that sent too much, in this order."""
        self._ask_more(now)

    def __contains__(self, node: NodeId) -> bool:
        """Whether a node's answer is incomplete."""
        return node in self._sizes

    @property
    def is_over(self) -> bool:
        """Whether the collection has ended."""
        return not self._sizes and (not self._left or self._is_full) and not self._asks_again

    @property
    def not_asked(self) -> int:
        """The number of nodes that were not asked."""
        return len(self._left)

    def pass_on(self, node: NodeId, data: bytes, is_last: bool) -> bytes:
        """Add a part that a node sent. Returns the bytes to pass on."""
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
        """Record that the receiver has read one node's complete answer."""
        if self._unread:
            node = self._unread.popleft()
            self._until.pop(node, None)
            if self._asks_again:
                self._left.append(node)
            self._ask_more(now)

    def add(self, nodes: Iterable[NodeId], now: float) -> None:
        """Also follow these nodes."""
        known = {*self._left, *self._sizes, *self._unread}
        self._left.extend(node for node in nodes if node not in known)
        self._ask_more(now)

    def restart(self, node: NodeId) -> None:
        """Discard a node's data, since it was asked again and sends everything from the beginning."""
        self._sizes[node] = 0

    def on_resume(self, now: float) -> None:
        """Try to ask more nodes: one that was out of reach may have returned."""
        self._ask_more(now)

    def finish(self, now: float) -> None:
        """Stop following: asked nodes can still answer for a while, but none is asked again."""
        if self._asks_again:
            self._asks_again, self._ends_at = False, now + self.limits.seconds
            self._left.clear()

    def forget(self, node: NodeId, now: float) -> None:
        if self._sizes.pop(node, None) is not None:
            del self._until[node]
            if not self.follows:
                self.lost.append(node)
            self._ask_more(now)

    def tick(self, now: float) -> None:
        self._is_full = self._is_full or now >= self._ends_at
        for node in [node for node, until in self._until.items() if min(until, self._ends_at) <= now]:
            del self._until[node]
            if self._sizes.pop(node, None) is not None:
                (self._left if self._asks_again else self.silent).append(node)
        self._ask_more(now)

    def wake_at(self) -> float:
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
        self._left.extend(away)  # they may return
        if wave:
            self._ask(wave)
