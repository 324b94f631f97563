"""The state of one run of the demo: a pure function of what its workers have reported, and when.

Law: times are seconds since the launcher was started, but for those after the kill, which count from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

Event = Mapping[str, Any]
"""What a worker tells: `event` ("start", "training", "step", "done"), `rank`, `pid`, and what belongs to it."""


class Phase(StrEnum):
    """Where a run is."""

    STARTING = "starting"
    TRAINING = "training"
    BROKEN = "broken"
    """Something was killed, and no step has been finished since its workers were started again."""
    FINISHED = "finished"
    GIVEN_UP = "given up"


class Track(NamedTuple):
    """One run: which launcher, how far it is, and what the kill has cost it."""

    launcher: str
    steps: int
    phase: Phase = Phase.STARTING
    step: int = 0
    killed: float | None = None
    killed_at: int = 0
    """The step at which the kill was."""
    lost: int = 0
    """Steps that were trained and have to be trained again, since no checkpoint has them."""
    resumed: int | None = None
    """The step of the checkpoint from which the new workers go on."""
    stopped: float | None = None
    """Seconds from the kill to the next step that was finished."""
    loss: float | None = None
    seconds: float | None = None
    """Until the launchers had ended."""
    gave_up: float | None = None
    reason: str = ""
    """Why it was given up."""


def told(track: Track, event: Event, now: float) -> Track:
    """A worker has told something."""
    name = event["event"]
    if name == "training" and track.phase is Phase.BROKEN:
        return track._replace(resumed=event["step"], lost=max(0, track.killed_at - event["step"]))
    if name == "step":
        if track.phase is Phase.BROKEN:
            if track.resumed is None or track.killed is None:  # of before the kill: it was still under way
                return track
            return track._replace(phase=Phase.TRAINING, step=event["step"], stopped=now - track.killed)
        return track._replace(phase=Phase.TRAINING, step=event["step"])
    return track._replace(loss=event["loss"]) if name == "done" else track


def killed(track: Track, now: float) -> Track:
    """A worker or a node was killed."""
    return track._replace(phase=Phase.BROKEN, killed=now, killed_at=track.step)


def finished(track: Track, now: float) -> Track:
    """All launchers have ended with exit code 0."""
    return track._replace(phase=Phase.FINISHED, seconds=now)


def given_up(track: Track, reason: str, now: float) -> Track:
    """It is not waited for any longer, or has failed."""
    return track._replace(phase=Phase.GIVEN_UP, reason=reason, gave_up=now)
