"""What an agent does about what happens. Pure: a phase and an event in, steps and the next phase out.

    FORMING   waits for a place in a round
    RUNNING   its workers run
    BROKEN    its workers have failed, all have been told; waits to hear whether the round or the job ends
    FINISHED  its workers have all succeeded; waits for the others (the exit barrier)
    ENDED     nothing more happens

Laws:

1. A failure is announced before anything is stopped, so that all nodes stop side by side.
2. The next round is asked for before the workers of the last one are stopped: it forms while they stop.
3. Workers are started only for a placement, and only after those of the round before are gone.
4. Only a verdict, a signal or the loss of the rendezvous ends the agent. A departure of others never does.
5. Notices of rounds that are over change nothing; but a round of ours that went by unseen is followed by another join.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

from rallypoint.failures.cause import Cause
from rallypoint.rendezvous.messages import (
    JobEnded,
    JoinRefused,
    LinkLost,
    NodesWaiting,
    Notice,
    Placed,
    Placement,
    Progress,
    RoundEnded,
)


class Phase(Enum):
    """Where an agent stands."""

    FORMING = auto()
    RUNNING = auto()
    BROKEN = auto()
    FINISHED = auto()
    ENDED = auto()


# Events besides the notices of the rendezvous.


class WorkersSucceeded(NamedTuple):
    """All workers of this node have exited with 0."""


class WorkersFailed(NamedTuple):
    """A worker of this node has failed; `cause` is the first of them."""

    cause: Cause


class SignalArrived(NamedTuple):
    """This agent has been asked to end."""

    number: int


Event = Notice | WorkersSucceeded | WorkersFailed | SignalArrived


# Steps: what the agent is to do, in order.


class Start(NamedTuple):
    """Take the place and start the workers."""

    placement: Placement


class Join(NamedTuple):
    """Ask for a place in the next round."""


class Stop(NamedTuple):
    """Stop the workers, if they run, so that they can be started again."""


class AnnounceFailure(NamedTuple):
    """Tell all of the failure."""

    cause: Cause


class AnnounceSuccess(NamedTuple):
    """Tell all that this node is done."""


class Drain(NamedTuple):
    """End the round in order, so that those who wait are taken in."""

    waiting: int


class Tell(NamedTuple):
    """Say something to the person who watches; `loud` makes it a warning."""

    text: str
    loud: bool = False


class End(NamedTuple):
    """Stop the workers and end with the job's verdict."""

    verdict: JobEnded


class GiveUp(NamedTuple):
    """Stop the workers and end with the error that this notice means."""

    notice: Notice


class Depart(NamedTuple):
    """Leave the job to the others, hand the signal to the workers and end."""

    signal: int


class Finish(NamedTuple):
    """End in success although the verdict cannot be heard any more."""


Step = (
    Start | Join | Stop | AnnounceFailure | AnnounceSuccess | Drain | Tell | End | GiveUp | Depart | Finish
)  # one word, one meaning: what to do


class Status(NamedTuple):
    """The agent's phase, and the round it holds a place in (-1 before the first)."""

    phase: Phase = Phase.FORMING
    round: int = -1


Decision = tuple[Status, tuple[Step, ...]]

_STARTED = frozenset({Phase.RUNNING, Phase.BROKEN, Phase.FINISHED})


def decide(status: Status, event: Event) -> Decision:
    """What follows from `event` for an agent that stands at `status`."""
    if status.phase is Phase.ENDED:
        return status, ()
    rule = _RULES.get(type(event))
    return (status, ()) if rule is None else rule(status, event)


def _ended(status: Status, *steps: Step) -> Decision:
    return Status(Phase.ENDED, status.round), steps


def _on_placed(status: Status, event: Placed) -> Decision:
    if status.phase is not Phase.FORMING:
        return status, ()
    return Status(Phase.RUNNING, event.placement.round), (Start(event.placement),)


def _on_round_ended(status: Status, event: RoundEnded) -> Decision:
    if status.phase is Phase.FORMING and event.end.round > status.round:
        # Our own round came and went before we heard of our place in it: ask for one in the next.
        return Status(Phase.FORMING, event.end.round), (Join(),)
    if status.phase not in _STARTED or event.end.round != status.round:
        return status, ()
    return Status(Phase.FORMING, status.round), (Tell(_account(event), loud=True), Join(), Stop())


def _account(event: RoundEnded) -> str:
    end = event.end
    if end.cause is None:
        return f"round {end.round} is over: {end.reason.value} ({end.node}); the workers are restarted"
    cause = end.cause
    how = f"exit code {cause.exitcode}" + (f", {cause.signal_name}" if cause.exitcode < 0 else "")
    return (
        f"round {end.round} is over: rank {cause.rank} failed on {cause.host} ({how}): {cause.message}; "
        "the workers are restarted"
    )


def _on_waiting(status: Status, event: NodesWaiting) -> Decision:
    if status.phase not in _STARTED or not event.waiting or event.round != status.round:
        return status, ()
    return status, (Drain(event.waiting),)


def _on_job_ended(status: Status, event: JobEnded) -> Decision:
    return _ended(status, End(event))


def _on_refused(status: Status, event: JoinRefused) -> Decision:
    return _ended(status, GiveUp(event)) if status.phase is Phase.FORMING else (status, ())


def _on_link_lost(status: Status, event: LinkLost) -> Decision:
    if status.phase is Phase.FINISHED:
        return _ended(status, Tell(f"{event.detail}; this node's workers had all succeeded", loud=True), Finish())
    return _ended(status, GiveUp(event))


def _on_progress(status: Status, event: Progress) -> Decision:
    steps = (Tell(f"waiting for the rendezvous: {event}", loud=True),) if status.phase is Phase.FORMING else ()
    return status, steps


def _on_workers_succeeded(status: Status, _event: WorkersSucceeded) -> Decision:
    if status.phase is not Phase.RUNNING:
        return status, ()
    return Status(Phase.FINISHED, status.round), (AnnounceSuccess(),)


def _on_workers_failed(status: Status, event: WorkersFailed) -> Decision:
    if status.phase is not Phase.RUNNING:
        return status, ()
    return Status(Phase.BROKEN, status.round), (AnnounceFailure(event.cause),)


def _on_signal(status: Status, event: SignalArrived) -> Decision:
    return _ended(status, Depart(event.number))


_RULES: dict[type, Callable[..., Decision]] = {
    Placed: _on_placed,
    RoundEnded: _on_round_ended,
    NodesWaiting: _on_waiting,
    JobEnded: _on_job_ended,
    JoinRefused: _on_refused,
    LinkLost: _on_link_lost,
    Progress: _on_progress,
    WorkersSucceeded: _on_workers_succeeded,
    WorkersFailed: _on_workers_failed,
    SignalArrived: _on_signal,
}
"""Events that are not named here change nothing."""
