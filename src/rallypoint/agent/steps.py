"""The events of an agent besides its rendezvous's notifications, and the steps of its policy. Plain data.

Event   what has happened; the policy decides what follows
Step    what follows; `actions` carries it out. Requests to the coordinator are used as steps directly
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
    """A worker of this node has failed; `cause` is the first failure.

    `shared_signals` are the signals that all processes of this node's part of the job received a moment before.
    `max_restarts` is the number of failures that the job may survive, as far as this node knows.
    """

    cause: Cause
    shared_signals: frozenset[int] = frozenset()
    max_restarts: int = 0


class WorkersFenced(NamedTuple):
    """The reaper has killed this node's workers, because the coordinator was silent for the lease."""


class WorkersStopped(NamedTuple):
    """The stop is done: no worker of this node is left, and nothing that one has started.

    `ended_in_order`: all workers have ended without SIGKILL, with success or by the signal of the stop. `waiting`: some
    have left their round and wait in their processes for the next one. `ended_with_0`: there were workers, and all have
    exited with 0.
    """

    ended_in_order: bool = False
    waiting: bool = False
    ended_with_0: bool = False


class WorkersStarted(NamedTuple):
    """The workers of this round have been started, as the policy wanted."""

    round: int


class WorkersReady(NamedTuple):
    """All workers of this node have acknowledged the notice, or the deadline has passed: `is_late`."""

    is_late: bool = False


class NodeChecked(NamedTuple):
    """The user's check of this node has ended, and nothing of it is left. `failure` says why it has not passed."""

    failure: str = ""


class SignalArrived(NamedTuple):
    """This agent received a signal that it handles. `notice`: the most seconds that the workers can have to save."""

    number: int
    notice: float = math.inf


class DrainArrived(NamedTuple):
    """An operator asks this node to leave (`DrainRequested`). `notice`: seconds that the workers have to save first;
    0.0 if asking them would be useless.
    """

    by: str
    notice: float


class Timer(Enum):
    """What the agent waits for, each for a limited time."""

    NOTICE = "notice"
    """The acknowledgements of a notice; a node that leaves waits no longer."""
    SIGNAL = "signal"
    """The signal that ended a worker, which may have been sent to this agent too."""
    VERDICT = "verdict"
    """The verdict of a job that is being ended as a whole."""
    QUERY = "query"
    """The next query for the state of the job without this node."""
    PROGRESS = "progress"
    """The next query for the progress of awaited nodes; it is no event."""
    LEAVE = "leave"
    """An answer to QUERY that the job ends."""


class TimerFired(NamedTuple):
    """The time of this timer has passed."""

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
    """Run the user's check of this node; `NodeChecked` follows, unless a stop ends the check first."""


class StopWorkers(NamedTuple):
    """Begin to stop the workers, or the check that runs instead of them; `WorkersStopped` follows.

    `restarts`: they will be restarted. `failed`: a failure has ended their round, so that there is nothing to save
    beyond writes in progress, and the grace period is the short one. `shared`: the sender whose signal made this agent
    stop them may have signalled them too. `ends_all`: they will be restarted, but none may continue in its process.
    """

    signal: int = SIGTERM
    restarts: bool = False
    failed: bool = False
    shared: bool = False
    ends_all: bool = False


class StopHeld(NamedTuple):
    """After the stop in progress, let no worker continue in its process: any that would is stopped too.

    `failed`: see `StopWorkers`.
    """

    signal: int = SIGTERM
    failed: bool = False


class KillWorkers(NamedTuple):
    """Kill the workers that are being stopped, at once."""


class ForwardSignal(NamedTuple):
    """Send the running workers a signal that does not end them."""

    signal: int


class SetTimer(NamedTuple):
    """Start this timer, or restart it: `TimerFired` follows after this many seconds."""

    timer: Timer
    seconds: float


class PostNotice(NamedTuple):
    """Post a notice to the workers of this node and wait for their acknowledgements; `WorkersReady` follows.

    `node` is the node that will be taken away, empty for this one.
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
    """Announce that this node has failed in `round` for a reason that is no worker's own, as `text` says. `ends_job`
    ends the job, even if restarts are left.
    """

    round: int
    text: str
    ending: Ending
    ends_job: bool = False


class End(NamedTuple):
    """End when the workers are gone; nothing happens after this.

    `event` ends the agent: the verdict, a failed rendezvous, a failed check of this node, or a signal. `standing` is a
    text on how the job continues without this node after a signal; empty if it does not. `saved`: whether all workers
    of this node had acknowledged a notice; None if this means nothing. `drained_by` is the operator who has drained
    this node, if any. `unasked` is a text on why it is unknown whether the job continues; empty if it is known.
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
