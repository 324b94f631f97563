"""The errors of frames, and those of a rendezvous: the branch of `base.errors` that the contract's section 7.7 names,
and the error that each notification stands for.
"""

from __future__ import annotations

from rallypoint.base.errors import RallypointError
from rallypoint.control.membership.state import Outcome, Refusal, Verdict
from rallypoint.control.protocol.messages import JobEnded, JoinRefused, LinkLost, Notification, Progress
from rallypoint.failures.cause import Ending


class RendezvousError(RallypointError):
    """A rendezvous failed."""


class RendezvousClosedError(RendezvousError):
    """The job has ended; no node can join any more. `ending` is why, if it has not succeeded and this is known."""

    def __init__(self, *text: object, ending: Ending | None = None) -> None:
        super().__init__(*text)
        self.ending = ending


class RendezvousTimeoutError(RendezvousError):
    """Not enough nodes joined before the join deadline."""


class RendezvousConnectionError(RendezvousError):
    """The control plane cannot be reached, or what listens there is not ours."""


class RendezvousStateError(RendezvousError):
    """The shared state is damaged, or of another version."""


class RendezvousGracefulExitError(RendezvousError):
    """This node was a spare and the job has ended without it."""


class FrameError(Exception):
    """These bytes are not our frames; the text says what was seen."""


class SignatureError(FrameError):
    """A frame was not signed with this session's key, or is not the next one of its direction."""


_ERRORS: dict[Refusal, tuple[type[RallypointError], str]] = {
    Refusal.CLOSED: (
        RendezvousClosedError,
        "the job has ended, no node can join it any more: {detail}; give a new job its own --rdzv-id",
    ),
    Refusal.TIMEOUT: (
        RendezvousTimeoutError,
        "the rendezvous did not complete before the join deadline: {detail}; "
        "check that all nodes were started with the same endpoint, --nnodes and --rdzv-id",
    ),
    Refusal.RANK_TAKEN: (
        RendezvousClosedError,
        "another node has joined with this node's rank ({detail}); give each node its own --node-rank",
    ),
    Refusal.ANOTHER_JOB: (
        RendezvousClosedError,
        "another job with the default id 'none' runs at this endpoint ({detail}); give each job its own --rdzv-id",
    ),
    Refusal.SPARE_NOT_NEEDED: (RendezvousGracefulExitError, "{detail}; this spare was not needed"),
}


def error_of(notification: Notification) -> BaseException | None:
    """The exception that a notification stands for, for a caller that waits for a round; None if there is none."""
    match notification:
        case JoinRefused(detail=sentence, progress=Progress()):
            return RendezvousTimeoutError(sentence)
        case JoinRefused(refusal=refusal, detail=detail):
            kind, sentence = _ERRORS[refusal]
            return kind(sentence.format(detail=detail))
        case JobEnded(verdict=verdict):
            return _error_of_verdict(verdict)
        case LinkLost(detail=detail, error=error):
            return error or RendezvousConnectionError(detail)
        case _:
            return None


def _error_of_verdict(verdict: Verdict) -> RallypointError:
    if verdict.outcome is Outcome.FAILED and verdict.cause is not None:
        return RendezvousClosedError(f"the job has failed: {verdict.cause.headline}", ending=verdict.ending)
    ending = None if verdict.outcome is Outcome.SUCCEEDED else verdict.ending
    return RendezvousClosedError(f"the job has {verdict.outcome.value}; no node can join it any more", ending=ending)
