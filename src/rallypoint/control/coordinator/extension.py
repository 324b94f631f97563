"""Optional parts of a coordinator, which only some jobs use. Pure; in the coordinator's turns.

The coordinator decides which nodes are in a round, and knows nothing else, such as watchers. It reads a table of names,
imports a row when needed, and calls the methods of `Extension`.

Laws:

1. An extension is imported at its first use: for a message that it handles or observes, a state that needs it, or a
   session or snapshot that requests it. An unused extension costs nothing.
2. An extension sends messages, and can run operations as an operator does (`Coordinator.operate`). It never changes a
   state itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rallypoint.control.coordinator.sessions import SessionRecord
    from rallypoint.control.membership.state import NodeId, State


class Extension:
    """One extension of one coordinator, created with it. A subclass overrides the methods that it needs."""

    handlers: Mapping[type, Callable[[SessionRecord, Any, float], None]] = MappingProxyType({})
    """Handlers of messages from nodes, which can arrive unrequested, by type."""

    @property
    def is_awaited(self) -> bool:
        """Whether the server must wait a moment for it before ending."""
        return False

    def on_change(self, before: State, after: State, now: float) -> None:
        """React to a change of the state."""

    def on_resume(self, node: NodeId, now: float) -> None:
        """React to a node that returned in a new session."""

    def on_message(self, message: Any, now: float) -> None:
        """React to a message of an observed type that is sent to a node."""

    def forget(self, node: NodeId, now: float) -> None:
        """Forget a node that is gone."""

    def tick(self, now: float) -> None:
        """Do what is due."""

    def wake_at(self) -> float:
        """When `tick` next has something to do; infinity for never."""
        return math.inf
