"""Errors of frames and of a rendezvous (the branch of `base.errors` in the contract's section 7.7), and the error for
each notification."""

from __future__ import annotations

from rallypoint.base.errors import RallypointError
from rallypoint.control.membership.state import Outcome, Refusal, Verdict
from rallypoint.control.protocol.messages import JobEnded, JoinRefused, LinkLost, Notification, Progress
from rallypoint.failures.cause import Ending


class RendezvousError(RallypointError):
    """A rendezvous failed."""


class RendezvousClosedError(RendezvousError):
    """The job has ended, so no node can join. `ending` is the reason, unless unknown or a success."""

    def __init__(self, *text: object, ending: Ending | None = None) -> None:
        super().__init__(*text)
        self.ending = ending


class RendezvousTimeoutError(RendezvousError):
    """Not enough nodes joined before the join deadline."""


class RendezvousConnectionError(RendezvousError):
    """The control plane cannot be reached, or another service listens there."""


class RendezvousStateError(RendezvousError):
    """The shared state is damaged or has another version."""


class RendezvousGracefulExitError(RendezvousError):
    """This node was a spare, and the job ended without it."""


class FrameError(Exception):
    """The bytes are not our frames; the text describes them."""


class SignatureError(FrameError):
    """A frame has another key's signature, or is not the next one in its direction."""


_ERRORS: dict[Refusal, tuple[type[RallypointError], str]] = {
    Refusal.CLOSED: (
        RendezvousClosedError,
        "the job has ended, so nodes can no longer join it: {detail}; use another --rdzv-id for a new job",
    ),
    Refusal.TIMEOUT: (
        RendezvousTimeoutError,
        "the rendezvous did not complete before the join deadline: {detail}; "
        "check that all nodes were started with the same endpoint, --nnodes and --rdzv-id",
    ),
    Refusal.RANK_TAKEN: (
        RendezvousClosedError,
        "another node joined with this node's rank ({detail}); set a different --node-rank on each node",
    ),
    Refusal.ANOTHER_JOB: (
        RendezvousClosedError,
        "another job with the default id 'none' is running at this endpoint ({detail}); set a different --rdzv-id for "
        "each job",
    ),
    Refusal.SPARE_NOT_NEEDED: (RendezvousGracefulExitError, "{detail}; this spare was not needed"),
}


def error_of(notification: Notification) -> BaseException | None:
    """The exception to raise for a notification while waiting for a round; None for no exception."""
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
    return RendezvousClosedError(f"the job has {verdict.outcome.value}, so nodes can no longer join it", ending=ending)
