"""Requests of a waiting agent to the coordinator: the progress of other nodes, and the state of the job without this
node.

Nothing here waits: the loop sleeps until `ask_at`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rallypoint.agent import steps
from rallypoint.agent.rendezvous_client import RendezvousClient
from rallypoint.base.clock import Clock
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.protocol.messages import LeaveRequest, ProgressRequest
from rallypoint.rendezvous.control_plane import FIRST_PROGRESS_REQUEST, MAX_PROGRESS_INTERVAL

if TYPE_CHECKING:
    from rallypoint.agent.live_line import LiveLine

_LIVE_EVERY = 1.0
"""Seconds between requests for progress if a terminal shows it."""

_LEAVING, _LEAVING_EVERY = 1.0, 0.2
"""Seconds for which a job must go on without this node before that counts as certain, and between queries. A command
that ends a whole job on many nodes may reach the last of them that much later.
"""


class WaitingForOthers:
    """The requests of one agent that waits, and the line on a terminal that shows the answers."""

    def __init__(self, rendezvous: RendezvousClient, clock: Clock) -> None:
        self._rendezvous = rendezvous
        self._clock = clock
        self.ask_at = 0.0
        """When to ask next, on the clock, in the phases that ask."""
        self._ask_every = FIRST_PROGRESS_REQUEST
        self._joined_at = 0.0
        self._live_line: LiveLine | None = None
        """The line on a terminal that shows the progress."""
        self._leave_by = math.inf

    def begin(self) -> float:
        """This node requests a place and waits for the round. Returns the moment, on the clock."""
        self._ask_every = FIRST_PROGRESS_REQUEST
        self._joined_at = self._clock.monotonic()
        self.ask_at = self._joined_at + self._ask_every
        return self._joined_at

    def ask_progress(self) -> None:
        """If this node waits for others: request the progress, if that is due."""
        now = self._clock.monotonic()
        if now < self.ask_at:
            return
        self._ask_every = min(2 * self._ask_every, MAX_PROGRESS_INTERVAL)
        if self._live_line is not None:
            self._ask_every = _LIVE_EVERY
            self._live_line.redraw(now)
        self.ask_at = now + self._ask_every
        self._rendezvous.send(ProgressRequest())

    def shows_live(self, words: tuple[str, str]) -> bool:
        """Show the progress on the terminal; returns whether there is one."""
        if self._live_line is None:
            from rallypoint.agent.live_line import live_line

            self._live_line = live_line(self._joined_at)
            if self._live_line is None:
                return False
            self.ask_at = self._clock.monotonic() + _LIVE_EVERY
        self._live_line.show(words, self._clock.monotonic())
        return True

    def end(self) -> None:
        """This node does not wait for others any more. Idempotent."""
        if self._live_line is not None:
            self._live_line.end()
            self._live_line = None

    def begin_leaving(self) -> None:
        """This node leaves: from now on, query for a moment the state of the job without it."""
        self.ask_at = self._clock.monotonic()
        self._leave_by = self.ask_at + _LEAVING

    def leave_events(self) -> Iterator[steps.Event]:
        """If this node leaves: query again, until the time is over."""
        if self._clock.monotonic() < self.ask_at:
            return
        if self.ask_at >= self._leave_by:
            yield steps.LeaveTimedOut()
        else:
            self.ask_at = min(self.ask_at + _LEAVING_EVERY, self._leave_by)
            self._rendezvous.send(LeaveRequest(wants_reply=True))
