"""The hang of a job: each node's evidence about its workers goes to one node, whose report goes to all. Pure.

Laws:

1. No node is asked before the job hangs. Each hang is reported once; another one requires some activity first.
2. The coordinator does not store nodes' answers: it passes them on to the reporting node as they arrive.
3. The report names nodes that did not answer in time. If the reporting node sends no report, all nodes are told so.
4. A node whose connection broke is notified again when it returns, since messages in both directions may be lost. Its
   first part then replaces all earlier ones.
5. A new coordinator reports an inherited hang once all nodes are back, since the old one may not have sent its report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.control.coordinator.extension import Extension
from rallypoint.control.membership.endings import hang_began, is_hung
from rallypoint.control.membership.state import NodeId, State, name_of
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
from rallypoint.observe.watching.collection import Collection

if TYPE_CHECKING:
    from rallypoint.control.coordinator.coordinator import Coordinator
    from rallypoint.control.coordinator.sessions import SessionRecord

_REPORT = 15.0
"""Seconds that the reporting node has after the others have answered."""
_MOST_NAMED = 8
"""The most nodes without an answer whose names it gets."""
_NO_REPORT = "{} did not send the report of this hang within {:g} s, so there is none"


class HangInvestigation:
    """The investigation of a job's hang, if any.

    Args:
        tell: sends a notification to some nodes.
        numbers: numbers for collections, each used once.
        name: returns a node's readable name.
        settles: if each node collects for itself, seconds to wait before passing on a report. A node with its report
            may end the round, and the others must have theirs by then.
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
        """The report, until it may be passed on."""
        self._number, self._round = 0, -1
        self._nodes: Sequence[NodeId] = ()
        """The nodes to ask and notify; the first one reports. Empty after that."""
        self._round_size = 0
        """The number of nodes of the round."""
        self._asked: Collection | None = None
        """The collection, until it ends."""
        self._until = math.inf
        """The deadline for the report after that."""

    def check_hang(self, before: State, after: State, in_reach: Callable[[NodeId], bool], now: float) -> bool:
        """Start to ask the connected nodes if this change makes the round hang. Returns whether it does."""
        if not hang_began(before, after):
            return False
        self.begin(after, in_reach, now)
        return True

    def begin(self, after: State, in_reach: Callable[[NodeId], bool], now: float) -> None:
        """Ask the connected nodes about the hang."""
        in_order = sorted(after.participants, key=lambda node: after.participants[node].rank)
        nodes = [node for node in in_order if in_reach(node)]
        self._drop()
        if nodes:
            self._nodes, self._round_size = nodes, len(in_order)
            self._number, self._round = next(self._numbers), after.round
            self._settled_at = now + (self._settles if len(in_order) > 1 else 0.0)
            self._tell(nodes, HangFound(self._round, self._round_size))
            self._asked = Collection(CollectKind.HANG, nodes, in_reach, self._request, now)

    def resumed(self, node: NodeId, state: State) -> None:
        """Notify a node that returned in a new session."""
        if node in self._nodes and state.complete and state.round == self._round:
            self._tell([node], HangFound(self._round, self._round_size))
            if self._asked is not None and node in self._asked:
                self._asked.restart(node)
                self._request([node])

    def _request(self, nodes: Sequence[NodeId]) -> None:
        self._tell(nodes, CollectRequested(self._number, CollectKind.HANG))

    def on_answer(self, node: NodeId, answer: NodeAnswer, now: float) -> None:
        """Pass on a node's answer."""
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
            self._tell(self._nodes[:1], answer._replace(data=data, node=self._name(node)))
            self._end_if_complete(now)

    def forget(self, node: NodeId, now: float) -> None:
        if self._nodes and node == self._nodes[0]:
            self._drop()  # its round or even the job ends with it
        elif self._asked is not None:
            self._asked.forget(node, now)
            self._end_if_complete(now)

    def tick(self, now: float) -> None:
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
        """Drop this hang: it has been reported, or the reporting node is gone."""
        self._nodes, self._asked, self._ready, self._until = (), None, None, math.inf


class HangExtension(Extension):
    """The hangs in one coordinator's job."""

    def __init__(self, job: Coordinator) -> None:
        self.job = job
        self._hang = HangInvestigation(job.send_to, job.extensions.numbers, lambda node: name_of(job.state, node))
        self.handlers = dict.fromkeys((HangReport, Taken, CollectedPart), self._on_answer)
        self._awaits_nodes = False
        """Whether another coordinator left this hang, and some of its nodes are not back."""

    def _on_answer(self, speaker: SessionRecord, answer: NodeAnswer, now: float) -> None:
        self._hang.on_answer(speaker.node, answer, now)

    def on_change(self, before: State, after: State, now: float) -> None:
        """Start to ask if the round now hangs."""
        if not self._hang.check_hang(before, after, self.job.sessions.__contains__, now):
            return
        # Without sessions, another coordinator left this state, and the nodes are about to return (law 5).
        self._awaits_nodes = not any(node in self.job.sessions for node in after.participants)
        if not self._awaits_nodes:
            self.job.history.add("hang found", after.round, "no rank has shown a sign of life for a long time", now)

    def on_resume(self, node: NodeId, now: float) -> None:
        """Notify the node again; or start, if this was the last missing node."""
        state, sessions = self.job.state, self.job.sessions
        if not self._awaits_nodes:
            self._hang.resumed(node, state)
        elif is_hung(state) and all(member in sessions for member in state.participants):
            self._awaits_nodes = False
            self._hang.begin(state, sessions.__contains__, now)

    def forget(self, node: NodeId, now: float) -> None:
        self._hang.forget(node, now)

    def tick(self, now: float) -> None:
        self._hang.tick(now)

    def wake_at(self) -> float:
        return self._hang.wake_at()
