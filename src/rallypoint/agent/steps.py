"""The events of an agent besides the notifications of its rendezvous, and the steps of its policy. Plain data.

Event   what has happened; the policy decides what follows
Step    what follows; `actions` carries it out. Requests to the coordinator are steps as they are
"""

from __future__ import annotations

import math
from enum import Enum
from signal import SIGTERM

from rallypoint.base.light_typing import NamedTuple
from rallypoint.control.membership.state import Drain, Fail, Preempt, PreemptJob, Succeed
from rallypoint.control.protocol.messages import JobEnded, JoinRefused, LeaveRequest, LinkLost, Notification, Placement
from rallypoint.failures.cause import Cause, Ending


class FeatureEvent:
    """The base of events that only a feature's rules know."""

    __slots__ = ()


class FeatureStep:
    """The base of steps that a feature carries out itself."""

    __slots__ = ()


# Events


class WorkersSucceeded(NamedTuple):
    """All workers of this node have exited with 0. `acknowledged`: some had acknowledged a notice before."""

    acknowledged: bool = False


class WorkersFailed(NamedTuple):
    """A worker of this node has failed; `cause` is the first of them.

    `shared_signals` are those that all processes of this node's part of the job were sent a moment before, and
    `max_restarts` is the number of failures that the job may survive, as far as this node knows.
    """

    cause: Cause
    shared_signals: frozenset[int] = frozenset()
    max_restarts: int = 0


class WorkersFenced(NamedTuple):
    """The reaper has killed the workers of this node, since nothing was heard from the coordinator for the lease."""


class WorkersStopped(NamedTuple):
    """The stop that was begun is done: no worker of this node is left, nor anything that one has started.

    `ended_in_order`: all workers have ended without SIGKILL, with success or by the signal of the stop. `waiting`: some
    are left, which have left their round and wait in their processes for the next one. `ended_with_0`: there were
    workers, and all have ended with exit code 0.
    """

    ended_in_order: bool = False
    waiting: bool = False
    ended_with_0: bool = False


class WorkersStarted(NamedTuple):
    """The workers of this round have been started. The policy knew that they would be."""

    round: int


class WorkersReady(NamedTuple):
    """All workers of this node have acknowledged the notice, or its time is over: `is_late`."""

    is_late: bool = False


class NodeChecked(NamedTuple):
    """The user's check of this node is over, and nothing of it is left. `failure` says why it has not passed."""

    failure: str = ""


class SignalArrived(NamedTuple):
    """This agent was sent a signal that it handles. `notice`: seconds that the workers may be given at most."""

    number: int
    notice: float = math.inf


class DrainArrived(NamedTuple):
    """An operator asks this node to leave (`DrainRequested`). `notice`: seconds that the workers have to save before
    that; 0.0 if nothing would come of asking them.
    """

    by: str
    notice: float


class Timer(Enum):
    """What is waited for, each for a limited time."""

    NOTICE = "notice"
    """The acknowledgements of a notice; whoever leaves waits no longer."""
    SIGNAL = "signal"
    """The signal that has ended a worker, which may have been sent to this agent too."""
    VERDICT = "verdict"
    """The verdict of a job that is being ended as a whole."""
    QUERY = "query"
    """The next query for the state of the job without this node."""
    PROGRESS = "progress"
    """The next query for the progress of the nodes that are waited for; it is no event."""
    LEAVE = "leave"
    """The answer to these that the job ends."""


class TimerFired(NamedTuple):
    """The time is over."""

    timer: Timer


Event = (
    Notification
    | WorkersSucceeded
    | WorkersFailed
    | WorkersFenced
    | WorkersStarted
    | WorkersStopped
    | NodeChecked
    | WorkersReady
    | SignalArrived
    | DrainArrived
    | TimerFired
    | FeatureEvent
)


# Steps, to be taken in order. None of them waits.


class StartWorkers(NamedTuple):
    """Begin the round of this placement and start its workers."""

    placement: Placement


class RequestJoin(NamedTuple):
    """Request a place in the next round, unless this node keeps the one that it has."""

    keeps_place: bool = False


class CheckNode(NamedTuple):
    """Run the user's check of this node; `NodeChecked` follows, unless a stop ends it before."""


class StopWorkers(NamedTuple):
    """Begin to stop the workers, or the check that runs in their place; `WorkersStopped` follows.

    `restarts`: they will be restarted. `failed`: their round has ended by a failure, so that there is nothing to save
    beyond writes in progress, and the grace period is the short one. `shared`: the sender that made this agent stop
    them may have sent the signal to them too. `ends_all`: they will be restarted, but none may continue in its process.
    """

    signal: int = SIGTERM
    restarts: bool = False
    failed: bool = False
    shared: bool = False
    ends_all: bool = False


class StopHeld(NamedTuple):
    """Let no worker continue in its process after the stop in progress: those that would are stopped by it too.

    `failed`: see `StopWorkers`.
    """

    signal: int = SIGTERM
    failed: bool = False


class KillWorkers(NamedTuple):
    """End the workers that are being stopped at once."""


class ForwardSignal(NamedTuple):
    """Send a signal to the running workers, which does not end them."""

    signal: int


class SetTimer(NamedTuple):
    """Wait for this many seconds from now, in place of any other time: `TimerFired` follows."""

    timer: Timer
    seconds: float


class PostNotice(NamedTuple):
    """Post a notice to the workers of this node and wait for their acknowledgements; `WorkersReady` follows.

    `node` is the one that will be taken away, empty for this one.
    """

    reason: str
    node: str
    seconds: float


class WithdrawNotice(NamedTuple):
    """Withdraw the notice: it is no longer needed."""


class PostStopNotice(NamedTuple):
    """Post a notice to the workers that they are being stopped; its deadline is the end of the grace period."""


class LogLine(NamedTuple):
    """Log a line."""

    text: str
    warning: bool = False


class FailNode(NamedTuple):
    """Announce that this node has failed in `round` for a reason that is no worker's own, as `text` says; `ends_job`
    ends the job, whatever restarts are left.
    """

    round: int
    text: str
    ending: Ending
    ends_job: bool = False


class End(NamedTuple):
    """End, when the workers are gone: after this nothing more happens.

    `event` ends the agent: the verdict, a rendezvous that has failed, a check of this node that has not passed, or a
    signal. `standing` is a text on how the job continues without this node after a signal; empty if it does not.
    `saved`: whether all workers of this node had acknowledged a notice; None if that says nothing. `drained_by` is the
    operator that has drained this node, if one has. `unasked` is a text on why it is not known whether the job
    continues; empty if that is known.
    """

    event: JobEnded | JoinRefused | LinkLost | NodeChecked | SignalArrived
    standing: str = ""
    saved: bool | None = None
    drained_by: str = ""
    unasked: str = ""


Step = (
    Fail
    | Succeed
    | Drain
    | Preempt
    | PreemptJob
    | LeaveRequest
    | StartWorkers
    | RequestJoin
    | CheckNode
    | StopWorkers
    | StopHeld
    | KillWorkers
    | ForwardSignal
    | SetTimer
    | PostNotice
    | WithdrawNotice
    | PostStopNotice
    | LogLine
    | FailNode
    | End
    | FeatureStep
)
