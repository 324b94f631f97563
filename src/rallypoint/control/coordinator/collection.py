"""What many nodes are asked for on behalf of one receiver: a watcher, or the node that reports a hang. Pure.

Laws:

1. Few nodes are asked at a time, and the next one only when the receiver has read all that an earlier one has sent:
   whoever reads slowly is sent slowly, and is not cut off for that.
2. What is passed on is bounded, for each node and in all. Nodes for which nothing is left are not asked, and counted.
3. A node that does not answer in time is no longer awaited.
4. A collection that follows does not end by itself: a node is asked again when the receiver has read its answer.

Laws of a hang:

1. No node is asked before the job hangs, and each hang is reported once: the next one begins after a sign of life.
2. Answers of nodes are not kept here: they are passed on to the reporting node as they arrive.
3. A node that does not answer in time is named in the report. If the reporting node sends no report, all are notified
   of that.
4. A node whose connection broke is notified again when it is back: what it was sent may not have arrived.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rallypoint.base.light_typing import NamedTuple
from rallypoint.control.membership.endings import hang_began
from rallypoint.control.membership.state import NodeId, State
from rallypoint.control.protocol.messages import (
    CollectedPart,
    CollectionEnded,
    CollectKind,
    CollectRequested,
    HangFound,
    HangReport,
    NodeAnswer,
    NodeReport,
    Notification,
    Taken,
)

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


# A hang: what each node can tell about its workers goes to one of them, and its report to all.


_REPORT = 15.0
"""Seconds that the reporting node has when the others have answered."""
_MOST_NAMED = 8
"""Nodes without an answer that it is told the names of."""
_NO_REPORT = "{} has not reported for {:g} s what its workers are doing, so there is no report of this hang"


class HangCollection:
    """The hang of a job that is being investigated, if there is one.

    Args:
        tell: sends a notification to given nodes.
        numbers: the numbers of requested collections; each is used once.
        name: returns the readable name of a node.
        settles: seconds before which no report is passed on, if each node collects for itself: a node that has its
            report may end the round, and the others must have theirs by then.
    """

    def __init__(
        self,
        tell: Callable[[Iterable[NodeId], Notification], None],
        numbers: Iterator[int],
        name: Callable[[NodeId], str],
        settles: float = 0.0,
    ) -> None:
        self._tell = tell
        self._numbers = numbers
        self._name = name
        self._settles = settles
        self._settled_at = 0.0
        self._ready: str | None = None
        """The report, while it is too early for it."""
        self._number, self._round = 0, -1
        self._nodes: Sequence[NodeId] = ()
        """The nodes that are asked and notified; the first of them reports. Empty once that is done."""
        self._of = 0
        """The number of nodes of the round."""
        self._asked: Collection | None = None
        """The collection, until nothing more is expected of it."""
        self._until = math.inf
        """When the report must be there, from then on."""

    def check_hang(self, before: State, after: State, in_reach: Callable[[NodeId], bool], now: float) -> bool:
        """The state has changed: if the round now hangs, begin to ask the connected nodes. Returns whether it does."""
        if not hang_began(before, after):
            return False
        in_order = sorted(after.participants, key=lambda node: after.participants[node].rank)
        nodes = [node for node in in_order if in_reach(node)]
        self._drop()
        if nodes:
            self._nodes, self._of = nodes, len(in_order)
            self._number, self._round = next(self._numbers), after.round
            self._settled_at = now + (self._settles if len(in_order) > 1 else 0.0)
            self._tell(nodes, HangFound(self._round, self._of))
            self._asked = Collection(CollectKind.HANG, nodes, in_reach, self._request, now)
        return True

    def resumed(self, node: NodeId, state: State) -> None:
        """A node is back in a new session."""
        if node in self._nodes and state.complete and state.round == self._round:
            self._tell([node], HangFound(self._round, self._of))
            if self._asked is not None and node in self._asked:
                self._request([node])

    def _request(self, nodes: Sequence[NodeId]) -> None:
        self._tell(nodes, CollectRequested(self._number, CollectKind.HANG))

    def on_answer(self, node: NodeId, answer: NodeAnswer, now: float) -> None:
        """A node has answered."""
        if isinstance(answer, NodeReport) or answer.number != self._number or not self._nodes:
            return
        if isinstance(answer, HangReport):
            if node == self._nodes[0]:
                self._report(answer.report, now)
        elif self._asked is None:
            return
        elif isinstance(answer, Taken):
            if node == self._nodes[0]:
                self._asked.on_read(now)
                self._end_if_complete(now)
        elif node in self._asked:
            data = self._asked.pass_on(node, answer.data, answer.is_last)
            self._tell(self._nodes[:1], CollectedPart(self._number, data, answer.is_last, self._name(node)))
            self._end_if_complete(now)

    def forget(self, node: NodeId, now: float) -> None:
        """A node is gone."""
        if self._nodes and node == self._nodes[0]:
            self._drop()  # its round ends with it, if not the job
        elif self._asked is not None:
            self._asked.forget(node, now)
            self._end_if_complete(now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if now < self.wake_at():
            return
        if self._asked is not None:
            self._asked.tick(now)
            self._end_if_complete(now)
        elif self._ready is not None:
            self._report(self._ready, now)
        else:
            self._report(_NO_REPORT.format(self._name(self._nodes[0]), _REPORT), now)

    def wake_at(self) -> float:
        """The time at which `tick` has something to do."""
        return self._until if self._asked is None else self._asked.wake_at()

    def _end_if_complete(self, now: float) -> None:
        collection = self._asked
        if collection is None or not collection.is_over:
            return
        silent = sorted(collection.silent)
        named = tuple(self._name(node) for node in silent[:_MOST_NAMED])
        self._asked, self._until = None, now + _REPORT
        ended = CollectionEnded(self._number, self._round, named, len(silent) - len(named) + collection.not_asked)
        self._tell(self._nodes[:1], ended)

    def _report(self, text: str, now: float) -> None:
        if now < self._settled_at:
            self._ready, self._until = text, self._settled_at
            return
        nodes = self._nodes
        self._drop()
        self._tell(nodes, HangReport(self._number, self._round, text))

    def _drop(self) -> None:
        """Nothing more is expected of anybody, if a report was sent before all had answered too."""
        self._nodes, self._asked, self._ready, self._until = (), None, None, math.inf
