"""Optional parts of a coordinator, which only some jobs use. Pure; in the coordinator's turns.

The coordinator decides which nodes are in a round, and knows of nothing else, such as watchers. It reads a table of
names, imports a row when it is needed, and calls the methods of `Extension`.

Laws:

1. An extension is imported when it is first used: by a message that it handles or observes, by a state that needs it,
   or by a session or snapshot that asks for it. An unused extension costs nothing.
2. An extension sends messages, and may run operations as an operator does (`Coordinator.operate`). It never changes a
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
    """Handlers of messages from nodes, which may come unasked, by type."""

    @property
    def is_awaited(self) -> bool:
        """Whether the server should wait a moment for it before it ends."""
        return False

    def on_change(self, before: State, after: State, now: float) -> None:
        """The state has changed."""

    def on_resume(self, node: NodeId, now: float) -> None:
        """A node has returned in a new session."""

    def on_message(self, message: Any, now: float) -> None:
        """A message of an observed type is sent to a node."""

    def forget(self, node: NodeId, now: float) -> None:
        """A node is gone."""

    def tick(self, now: float) -> None:
        """Time has passed."""

    def wake_at(self) -> float:
        """The time at which `tick` has something to do; infinity for never."""
        return math.inf
