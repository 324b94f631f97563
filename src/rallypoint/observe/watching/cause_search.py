"""The search for a cause on all nodes: a node whose worker failed because of another failure asks the others where
their workers are. Pure.

Laws:

1. The search decides nothing and changes no state: a node that finds an original failure reports it itself.
2. The first node of a round that asks gets the answers. All others search, and know that a search is running.
3. The size of the answers is limited, however large the job is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rallypoint.control.coordinator.extension import Extension
from rallypoint.control.protocol.messages import CauseClues, CauseSought
from rallypoint.control.protocol.ranges import MOST_ANSWERS

if TYPE_CHECKING:
    from rallypoint.control.coordinator.coordinator import Coordinator
    from rallypoint.control.coordinator.sessions import SessionRecord
    from rallypoint.control.membership.state import NodeId


class CauseExtension(Extension):
    """The search in one coordinator's job."""

    def __init__(self, job: Coordinator) -> None:
        self._job = job
        self.handlers = {CauseSought: self._on_sought, CauseClues: self._on_clues}
        self._round = -1
        """The last round with a search."""
        self._asks: NodeId | None = None
        """The node that asked."""
        self._awaited: set[NodeId] = set()
        """The nodes that may still answer."""

    def _on_sought(self, speaker: SessionRecord, request: CauseSought, _now: float) -> None:
        state, node = self._job.state, speaker.node
        if request.round <= self._round or not state.complete or state.round != request.round:
            return
        if node in state.participants:
            others = [other for other in state.participants if other != node]
            self._round, self._asks, self._awaited = request.round, node, set(others)
            self._job.send_to(others, request)

    def _on_clues(self, speaker: SessionRecord, answer: CauseClues, _now: float) -> None:
        if answer.round != self._round or speaker.node not in self._awaited:
            return
        self._awaited.discard(speaker.node)
        state = self._job.state
        runs = state.complete and state.round == answer.round
        if runs and self._asks is not None and len(state.participants) - len(self._awaited) <= MOST_ANSWERS + 1:
            self._job.send_to([self._asks], answer)

    def forget(self, node: NodeId, _now: float) -> None:
        self._awaited.discard(node)
        if node == self._asks:
            self._asks = None
