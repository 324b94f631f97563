"""Finds sessions that have fallen silent, seen by one observer on its own clock. Pure: `now` is passed in.

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
