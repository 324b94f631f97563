"""What only some jobs have at the coordinator, and how a coordinator gets it. Pure; in the coordinator's turns.

The coordinator decides who is in a round, and no more: it names nothing that is beside that, such as watchers. It reads
a table of names, imports a row when its time has come, and calls what `Extension` offers.

Laws:

1. An extension is imported when it is first used: by a message that it handles or observes, by a state that needs it,
   or by a session or snapshot that asks for it. What a job does not use costs nothing.
2. An extension sends messages, and runs operations as an operator may (`Coordinator.operate`). It never changes a state
   by itself.
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
    """One extension of one coordinator, with which it is made. A subclass overrides what it needs."""

    handlers: Mapping[type, Callable[[SessionRecord, Any, float], None]] = MappingProxyType({})
    """What it does with a message that a node has sent, perhaps without having been asked, by type."""

    @property
    def is_awaited(self) -> bool:
        """Whether the end of the server should wait for it for a moment."""
        return False

    def on_change(self, before: State, after: State, now: float) -> None:
        """The state has changed."""

    def on_resume(self, node: NodeId, now: float) -> None:
        """A node is back in a new session."""

    def on_message(self, message: Any, now: float) -> None:
        """A message that it observes is sent to a node."""

    def forget(self, node: NodeId, now: float) -> None:
        """A node is gone."""

    def tick(self, now: float) -> None:
        """Time has passed."""

    def wake_at(self) -> float:
        """The time at which `tick` has something to do; infinity for never."""
        return math.inf
