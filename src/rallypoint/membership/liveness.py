"""Which sessions have fallen silent, as one observer sees it on its own clock. Pure: `now` is handed in.

Laws:

1. A session with a lease that was silent for the lease is over.
2. Time in which we slept counts for nobody: what came meanwhile may wait unread.
3. Time in which nobody at all was heard counts for nobody either, if there are several and none is in our own process:
   then it is we who are cut off. Of one silent node of one, we take it for lost: that a node is, is likelier than that
   we are.
"""

from __future__ import annotations

import math

from rallypoint.base.light_typing import NamedTuple

_MAX_EXCUSED_PAUSES = 3
"""So many sleeps in a row are excused: who always sleeps must judge some day."""


class SilentSessions(NamedTuple):
    """What a look found: sessions that are `lost` because their nodes are, or `out_of_reach` because we are."""

    lost: tuple[int, ...] = ()
    out_of_reach: tuple[int, ...] = ()


class Liveness:
    """When each session was heard last."""

    def __init__(self, lease: float, outage_timeout: float) -> None:
        """Begin with no session.

        Args:
            lease: seconds of silence that a session may have.
            outage_timeout: seconds for which sessions are kept while nobody at all is heard.
        """
        self.lease = lease
        self.outage_timeout = outage_timeout
        self._heard: dict[int, float] = {}
        """Sessions with a lease."""
        self._local: set[int] = set()
        self._heard_at = -math.inf
        self._looked_at = -math.inf
        self._excused_pauses = 0
        """How many looks in a row came after a sleep, and found nobody for that."""

    def opened(self, session: int, now: float, *, leased: bool, local: bool) -> None:
        """A session begins; `local` if its node is in our own process."""
        self.heard(session, now)
        if leased:
            self._looked_at = self._looked_at if self._heard else now
            self._heard[session] = now
        if local:
            self._local.add(session)

    def heard(self, session: int, now: float) -> None:
        """A session has said something."""
        if self._seem_cut_off(now):
            self._grant_extra_time(now, now - self._heard_at)
        self._heard_at = now
        if session in self._heard:
            self._heard[session] = now

    def silence(self, session: int, now: float) -> float | None:
        """For how many seconds a session was not heard; None for one without a lease."""
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
        """When to look again, in seconds on the clock of `now`; infinity for never."""
        return self._looked_at + self.lease / 4 if self._heard else math.inf

    def check(self, now: float) -> SilentSessions:
        """Who is silent at `now`; nobody is found before `check_at`."""
        due = self._looked_at + self.lease / 4
        if now < due:
            return SilentSessions()
        late = now - due
        self._grant_extra_time(now, late)
        self._heard_at = min(now, self._heard_at + late)
        # After a sleep, look a little later: until then what waits unread is read.
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
        # Nodes speak three times in a lease; where they are many, more than twice, each at a time of its own.
        return now - self._heard_at >= self.lease / 2 and len(self._heard) >= 2 and not self._local

    def _grant_extra_time(self, now: float, seconds: float) -> None:
        for session, heard_at in self._heard.items():
            self._heard[session] = min(now, heard_at + seconds)
