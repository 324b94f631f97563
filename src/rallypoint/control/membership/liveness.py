"""Finds sessions and nodes that have fallen silent, seen by one observer on its own clock. Pure: `now` is passed in.

Laws:

1. A session with a lease that was silent for the lease is over.
2. Time in which we slept does not count: messages that arrived meanwhile may wait unread.
3. Time in which no session at all was heard does not count either, if there are several and none is in our own process:
   then it is we who are cut off. A single node that is silent counts as lost: that is more likely than that we are cut
   off.
"""

from __future__ import annotations

import math

from rallypoint.base.light_typing import NamedTuple
from rallypoint.control.membership.rules import ClockView
from rallypoint.control.membership.state import NodeId, RemovedNode, Settings, State

_MAX_EXCUSED_PAUSES = 3
"""The number of consecutive sleeps that are excused: an observer that always sleeps must decide at some point."""


class SilentSessions(NamedTuple):
    """The result of a check: sessions that are `lost` because their nodes are, or `out_of_reach` because we are."""

    lost: tuple[int, ...] = ()
    out_of_reach: tuple[int, ...] = ()


class Liveness:
    """Tracks when each session was last heard."""

    def __init__(self, lease: float, outage_timeout: float) -> None:
        """Begin with no session.

        Args:
            lease: seconds of silence that are allowed for a session.
            outage_timeout: seconds for which sessions are kept while none at all is heard.
        """
        self.lease = lease
        self.outage_timeout = outage_timeout
        self._heard: dict[int, float] = {}
        """When each session with a lease was last heard."""
        self._local: set[int] = set()
        self._heard_at = -math.inf
        self._looked_at = -math.inf
        self._excused_pauses = 0
        """The number of consecutive checks that came after a sleep, and were excused for that."""

    def opened(self, session: int, now: float, *, leased: bool, local: bool) -> None:
        """A session begins; `local` if its node is in our own process."""
        self.heard(session, now)
        if leased:
            self._looked_at = self._looked_at if self._heard else now
            self._heard[session] = now
        if local:
            self._local.add(session)

    def heard(self, session: int, now: float) -> None:
        """A session has sent something."""
        if self._seem_cut_off(now):
            self._grant_extra_time(now, now - self._heard_at)
        self._heard_at = now
        if session in self._heard:
            self._heard[session] = now

    def silence(self, session: int, now: float) -> float | None:
        """Seconds since a session was last heard; None for one without a lease."""
        heard_at = self._heard.get(session)
        return None if heard_at is None else max(0.0, now - heard_at)

    def closed(self, session: int) -> None:
        """A session is over."""
        self._heard.pop(session, None)
        self._local.discard(session)

    @property
    def local_sessions(self) -> frozenset[int]:
        """The sessions of nodes in our own process."""
        return frozenset(self._local)

    def check_at(self) -> float:
        """The time of the next check, in seconds on the clock of `now`; infinity for never."""
        return self._looked_at + self.lease / 4 if self._heard else math.inf

    def check(self, now: float) -> SilentSessions:
        """The sessions that are silent at `now`; none is found before `check_at`."""
        due = self._looked_at + self.lease / 4
        if now < due:
            return SilentSessions()
        late = now - due
        self._grant_extra_time(now, late)
        self._heard_at = min(now, self._heard_at + late)
        # After a sleep, check a little later: until then unread messages are read.
        self._excused_pauses = (
            self._excused_pauses + 1 if late > self.lease / 8 and self._excused_pauses < _MAX_EXCUSED_PAUSES else 0
        )
        self._looked_at = now - (self.lease * 3 / 16 if self._excused_pauses else 0.0)
        if self._excused_pauses:
            return SilentSessions()
        if self._seem_cut_off(now):
            return SilentSessions(
                out_of_reach=tuple(self._heard) if now - self._heard_at >= self.outage_timeout else ()
            )
        return SilentSessions(
            lost=tuple(each for each, heard_at in self._heard.items() if now - heard_at >= self.lease)
        )

    def _seem_cut_off(self, now: float) -> bool:
        # Nodes send three heartbeats in a lease; if they are many, more than two, each at its own time.
        return now - self._heard_at >= self.lease / 2 and len(self._heard) >= 2 and not self._local

    def _grant_extra_time(self, now: float, seconds: float) -> None:
        for session, heard_at in self._heard.items():
            self._heard[session] = min(now, heard_at + seconds)


class Observer:
    """What one observer of a state has seen since when, on its own clock. Call `observe` with each new state first.

    The state holds counters instead of times (law 9 of `rules`): a node whose heartbeat counter has not changed for the
    whole allowance is gone, whatever any wall clock says.
    """

    def __init__(self, settings: Settings) -> None:
        self._interval = settings.keep_alive_interval
        self.allowance = settings.keep_alive_interval * settings.keep_alive_max_attempt
        """Seconds for which a node's heartbeats may be missing."""
        self._heartbeats: dict[NodeId, tuple[int, float]] = {}
        self._last_call: tuple[int, float] | None = None
        self._observed_at: float | None = None
        self._round: tuple[int, float] | None = None
        self._running_at: float | None = None
        self._removed: dict[RemovedNode, float] = {}

    def observe(self, state: State, now: float) -> None:
        """Record a state seen at `now`, in seconds on the observer's clock."""
        unseen = 0.0
        if self._observed_at is not None:
            # While the observer slept, or the service was unreachable, no heartbeats could be seen: that time does not
            # count for any node.
            unseen = max(0.0, now - self._observed_at - self._interval / 2)
        self._observed_at = now
        self._heartbeats = {
            node: (count, seen[1] + unseen)
            if (seen := self._heartbeats.get(node)) and seen[0] == count
            else (count, now)
            for node, count in state.heartbeats.items()
        }
        if self._round is None or self._round[0] != state.round:
            self._round, self._running_at = (state.round, now), None
        if not state.complete:
            self._running_at = None
        elif self._running_at is None:
            self._running_at = now
        if state.removed or self._removed:
            self._removed = {each: self._removed.get(each, now) for each in state.removed}
        if not state.last_call:
            self._last_call = None
        elif self._last_call is None or self._last_call[0] != state.last_call:
            self._last_call = (state.last_call, now)

    def silent(self, now: float) -> list[NodeId]:
        """Nodes without heartbeats for the whole allowance, in order."""
        return sorted(node for node, (_, since) in self._heartbeats.items() if now - since >= self.allowance)

    def clock_view(self, now: float, heartbeat_at: float | None = None) -> ClockView:
        """The clock view for the core at `now`."""
        last_call_at = self._last_call[1] if self._last_call else None
        forming_at = self._round[1] if self._round else None
        return ClockView(now, last_call_at, heartbeat_at, forming_at, self._running_at, tuple(self._removed.values()))
