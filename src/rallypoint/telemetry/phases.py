"""What a node does, and for how long: phases that follow one another without gap, so that they add up. Pure."""

from __future__ import annotations

from enum import StrEnum


class NodePhase(StrEnum):
    """What a node of a job is at."""

    RENDEZVOUS = "rendezvous"
    """It waits for a place in a round."""
    HELD_BACK = "held_back"
    """The same, while the next round is delayed after failures without progress."""
    STARTING = "starting"
    """It has a place, and its workers are being started."""
    RUNNING = "running"
    STOPPING = "stopping"
    """A failure was seen, or the workers are being stopped for another reason."""


class PhaseClock:
    """Counts the seconds that a node spends in each phase. They add up to the time since it began.

    Args:
        now: when it begins, in seconds on any clock that does not go backwards.
    """

    def __init__(self, now: float) -> None:
        self.phase = NodePhase.RENDEZVOUS
        self._since = now
        self._held_until = now
        self._seconds = dict.fromkeys(NodePhase, 0.0)

    def enter(self, phase: NodePhase, now: float, held_back: float = 0.0) -> None:
        """Another phase begins; of HELD_BACK, `held_back` seconds count as that and the rest as RENDEZVOUS."""
        self._seconds = self.seconds(now)
        self.phase, self._since, self._held_until = phase, now, now + held_back

    def seconds(self, now: float) -> dict[NodePhase, float]:
        """The seconds in each phase up to `now`."""
        found = dict(self._seconds)
        if self.phase is NodePhase.HELD_BACK:
            held = max(0.0, min(now, self._held_until) - self._since)
            found[NodePhase.HELD_BACK] += held
            found[NodePhase.RENDEZVOUS] += now - self._since - held
        else:
            found[self.phase] += now - self._since
        return found
