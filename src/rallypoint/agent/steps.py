"""An agent's events, except rendezvous notifications, and the steps of its policy. Plain data.

Event   what happened; the policy decides what follows
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
    """All workers of this node exited with 0. `acknowledged`: some acknowledged a notice before."""

    acknowledged: bool = False


class WorkersFailed(NamedTuple):
    """A worker of this node failed; `cause` is the first failure.

    `shared_signals` are the signals that all processes of this node's part of the job received a moment before.
    `max_restarts` is the number of failures that the job can survive, as far as this node knows.
    """

    cause: Cause
    shared_signals: frozenset[int] = frozenset()
    max_restarts: int = 0


class WorkersFenced(NamedTuple):
    """The reaper killed this node's workers, because the coordinator was silent for the lease."""


class WorkersStopped(NamedTuple):
    """The stop is complete: no worker of this node is left, nor any process that one started.

    `ended_in_order`: all workers ended without SIGKILL, with success or by the stop's signal. `waiting`: some left
    their round and are waiting in their processes for the next one. `ended_with_0`: there were workers, and all exited
    with 0.
    """

    ended_in_order: bool = False
    waiting: bool = False
    ended_with_0: bool = False


class WorkersStarted(NamedTuple):
    """The round's workers were started, as the policy decided."""

    round: int


class WorkersReady(NamedTuple):
    """All workers of this node acknowledged the notice, or the deadline passed (`is_late`)."""

    is_late: bool = False


class NodeChecked(NamedTuple):
    """The user's node check ended, and none of its processes is left. `failure`: why it did not pass."""

    failure: str = ""


class SignalArrived(NamedTuple):
    """This agent received a signal that it handles. `notice`: the maximum seconds for workers to save."""

    number: int
    notice: float = math.inf


class DrainArrived(NamedTuple):
    """An operator asks this node to leave (`DrainRequested`). `notice`: seconds that workers get to save first; 0.0 if
    asking them is useless."""

    by: str
    notice: float


class Timer(Enum):
    """What the agent waits for with a time limit."""

    NOTICE = "notice"
    """Acknowledgements of a notice; a leaving node then stops waiting."""
    SIGNAL = "signal"
    """The signal that ended a worker, if it was also sent to this agent."""
    VERDICT = "verdict"
    """The verdict of a job that is ending as a whole."""
    QUERY = "query"
    """The next query for the job's state without this node."""
    PROGRESS = "progress"
    """The next query for the awaited nodes' progress; no event."""
    LEAVE = "leave"
    """An answer to QUERY that the job is ending."""


class TimerFired(NamedTuple):
    """This timer fired."""

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


# Steps, to be taken in order. No step waits.


class StartWorkers(NamedTuple):
    """Begin this placement's round and start its workers."""

    placement: Placement


class RequestJoin(NamedTuple):
    """Request a place in the next round, unless this node keeps its current one."""

    keeps_place: bool = False


class CheckNode(NamedTuple):
    """Run the user's node check; `NodeChecked` follows, unless a stop ends the check first."""


class StopWorkers(NamedTuple):
    """Begin to stop the workers, or the node check that runs instead; `WorkersStopped` follows.

    `restarts`: the workers will be restarted. `failed`: a failure ended their round: they have nothing to save beyond
    writes in progress, and get the short grace period. `shared`: the sender of the signal to this agent might have
    signalled them too. `ends_all`: they will be restarted, but none may continue in its process.
    """

    signal: int = SIGTERM
    restarts: bool = False
    failed: bool = False
    shared: bool = False
    ends_all: bool = False


class StopHeld(NamedTuple):
    """Also stop all workers that would continue in their processes after the stop in progress.

    `failed`: see `StopWorkers`.
    """

    signal: int = SIGTERM
    failed: bool = False


class KillWorkers(NamedTuple):
    """Kill the workers that are being stopped."""


class ForwardSignal(NamedTuple):
    """Send a signal that does not end workers to those that are running."""

    signal: int


class SetTimer(NamedTuple):
    """Start or restart this timer; `TimerFired` follows after this many seconds."""

    timer: Timer
    seconds: float


class PostNotice(NamedTuple):
    """Post a notice to the workers of this node and wait for their acknowledgements; `WorkersReady` follows.

    `node` is the node that will be removed, empty for this one.
    """

    reason: str
    node: str
    seconds: float


class WithdrawNotice(NamedTuple):
    """Withdraw a notice that is no longer needed."""


class PostStopNotice(NamedTuple):
    """Notify the workers that they are being stopped; the deadline is the end of the grace period."""


class LogLine(NamedTuple):
    text: str
    warning: bool = False


class FailNode(NamedTuple):
    """Announce that this node failed in `round` because of `text`, which is no worker's failure. `ends_job` ends the
    job even if restarts are left."""

    round: int
    text: str
    ending: Ending
    ends_job: bool = False


class End(NamedTuple):
    """End when the workers are gone; nothing happens after this.

    `event` ends the agent: the verdict, a failed rendezvous, a failed node check, or a signal. `standing` says how the
    job continues without this node after a signal; empty if it does not. `saved`: whether all workers of this node
    acknowledged a notice; None if not applicable. `drained_by` is the operator who drained this node, if any. `unasked`
    says why it is unknown whether the job continues; empty if known.
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
