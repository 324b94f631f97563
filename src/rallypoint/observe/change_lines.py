"""The state of a job as successive lines: one line for each change. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rallypoint.observe.status_text import phase_sentence, restarts_sentence
from rallypoint.protocol.observation import NodeState, Phase, Snapshot

_FORMING = frozenset({Phase.WAITING, Phase.FORMING, Phase.HELD_BACK})


class ChangeLines:
    """Tells of each snapshot what the ones before did not say."""

    def __init__(self) -> None:
        self._incarnation = ""
        self._number = 0
        """Of the last event that was told."""
        self._standing: tuple[object, ...] | None = None
        """What was last said of how the job stands, but for how long."""

    def lines(self, snapshot: Snapshot, now: float) -> Iterator[str]:
        """What is new; each line begins with a time of day.

        Args:
            snapshot: of the job.
            now: the time of day, in seconds since 1970.
        """
        first = self._standing is None
        if snapshot.incarnation != self._incarnation:
            self._incarnation, self._number = snapshot.incarnation, 0
        news = [each for each in snapshot.events if each.number > self._number]
        self._number = max([self._number, *(each.number for each in news)])
        if not first:  # who begins to watch is told how things stand, and not the past
            yield from (f"{clock_time(now - each.seconds_ago)} {each.text}" for each in news)
        standing = _standing(snapshot)
        # That a round has started or ended was just said; who has come to one that forms was not.
        told_by_event = snapshot.phase not in _FORMING and bool(news)
        if standing != self._standing and (first or not told_by_event):
            job = f"job {snapshot.job}, round {snapshot.round}: " if first else ""
            text = f"{job}{phase_sentence(snapshot)}"
            yield f"{clock_time(now)} {text}{f'; restarts: {restarts_sentence(snapshot)}' if first else ''}"
        self._standing = standing


def clock_time(moment: float) -> str:
    """A time of day on this machine's clock, `14:03:59`."""
    return time.strftime("%H:%M:%S", time.localtime(moment))


def _standing(snapshot: Snapshot) -> tuple[object, ...]:
    participants = sum(each.state is NodeState.PARTICIPANT for each in snapshot.nodes)
    forms = (participants, snapshot.expected) if snapshot.phase in _FORMING else ()
    return (snapshot.phase, snapshot.round, snapshot.min_nodes, snapshot.max_nodes, *forms)
