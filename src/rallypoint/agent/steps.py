"""Events of an agent besides the notifications of the rendezvous, and the steps that its policy takes. Plain data."""

from __future__ import annotations

import math
from signal import SIGTERM

from rallypoint.base.light_typing import NamedTuple
from rallypoint.failures.cause import Cause
from rallypoint.membership.operations import Drain, Fail, Preempt, PreemptJob, Succeed
from rallypoint.protocol.messages import (
    CollectedPart,
    CollectionEnded,
    CollectRequested,
    JobEnded,
    LeaveRequest,
    Notification,
    Placement,
)

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
    are left, which have left their round and wait in their processes for the next one.
    """

    ended_in_order: bool = False
    waiting: bool = False


class WorkersReady(NamedTuple):
    """All workers of this node have acknowledged the notice, or its time is over: `is_late`."""

    is_late: bool = False


class NoticeExpired(NamedTuple):
    """The time of the notice is over."""


class NodeChecked(NamedTuple):
    """The user's check of this node is over, and nothing of it is left. `failure` says why it has not passed."""

    failure: str = ""


class SignalArrived(NamedTuple):
    """This agent was sent a signal that it handles. `notice`: seconds that the workers may be given at most."""

    number: int
    notice: float = math.inf


class PreemptionRequested(NamedTuple):
    """This node was told that the whole job will be taken away, in the way that `why` says ("received SIGUSR2").

    The workers have `seconds` to save.
    """

    seconds: float
    why: str


class VerdictTimedOut(NamedTuple):
    """The verdict of the preempted job has not arrived in time."""


class SignalTimedOut(NamedTuple):
    """The awaited signal has not arrived."""


class LeaveTimedOut(NamedTuple):
    """The time for querying the job's state is over."""


Event = (
    Notification
    | WorkersSucceeded
    | WorkersFailed
    | WorkersFenced
    | WorkersStopped
    | NodeChecked
    | WorkersReady
    | NoticeExpired
    | SignalArrived
    | PreemptionRequested
    | VerdictTimedOut
    | SignalTimedOut
    | LeaveTimedOut
)


# Steps, to be taken in order; requests to the coordinator are steps as they are. None of them waits.


class StartWorkers(NamedTuple):
    """Begin the round of this placement and start its workers."""

    placement: Placement


class RequestJoin(NamedTuple):
    """Request a place in the next round."""


class CheckNode(NamedTuple):
    """Run the user's check of this node; `NodeChecked` follows, unless a stop ends it before."""


class StopWorkers(NamedTuple):
    """Begin to stop the workers, or the check that runs in their place; `WorkersStopped` follows.

    `restarts`: they will be restarted. `failed`: their round has ended by a failure, so that there is nothing to save
    beyond writes in progress, and the grace period is the short one. `shared`: the sender that made this agent stop
    them may have sent the signal to them too. `ends_all`: they will be restarted, but none may go on in its process.
    """

    signal: int = SIGTERM
    restarts: bool = False
    failed: bool = False
    shared: bool = False
    ends_all: bool = False


class KeepNobody(NamedTuple):
    """Let no worker go on in its process after the stop in progress: those that would are stopped by this signal too.

    `failed`: see `StopWorkers`.
    """

    signal: int = SIGTERM
    failed: bool = False


class KillWorkers(NamedTuple):
    """End the workers that are being stopped at once."""


class ForwardSignal(NamedTuple):
    """Send a signal to the running workers, which does not end them."""

    signal: int


class AwaitSignal(NamedTuple):
    """Wait a moment for the signal that has ended a worker: `SignalArrived` or `SignalTimedOut` follows."""


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


class AwaitVerdict(NamedTuple):
    """Wait for the verdict of a preempted job, whose workers have this many seconds: `JobEnded` or `VerdictTimedOut`
    follows."""

    seconds: float


class RequeueJob(NamedTuple):
    """Ask the scheduler to start the preempted job again, if that is requested."""


class LogLine(NamedTuple):
    """Log a line. A terminal shows the `live` texts, if any, in a line that is rewritten: see `ProgressText`."""

    text: str
    warning: bool = False
    live: tuple[str, str] = ("", "")


class ReportStatus(NamedTuple):
    """Report the state of this node's workers to the coordinator, because there are watchers."""


class Collect(NamedTuple):
    """Collect from the workers what an operator requests, and send it."""

    request: CollectRequested


class AddToReport(NamedTuple):
    """Add this to the report of a hang, which this node makes; after the last part, make and send the report."""

    message: CollectedPart | CollectionEnded


class FailHung(NamedTuple):
    """Announce that `round` has failed by a hang, which `text` describes; `ends_job` ends the job, whatever restarts
    are left.
    """

    round: int
    text: str
    ends_job: bool


class QueryStanding(NamedTuple):
    """Query for a moment the state of the job without this node; `LeaveReply` and `LeaveTimedOut` follow."""


# Last steps: the workers are gone, and after one of these nothing more happens.


class EndWithVerdict(NamedTuple):
    """End with the job's verdict. `saved`: whether all workers of this node have, where the job was preempted."""

    verdict: JobEnded
    saved: bool | None = None


class EndWithError(NamedTuple):
    """End with the error that this notification stands for."""

    notification: Notification


class EndUnfit(NamedTuple):
    """End because the user's check of this node has not passed, as `failure` says."""

    failure: str


class EndBySignal(NamedTuple):
    """End because of the signal. `standing` is a text on how the job goes on without this node; empty if it does not.

    `saved`: the workers had acknowledged the notice before.
    """

    signal: int
    standing: str = ""
    saved: bool = False


class EndInSuccess(NamedTuple):
    """End in success although the verdict cannot arrive any more."""


FinalStep = EndWithVerdict | EndWithError | EndUnfit | EndBySignal | EndInSuccess

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
    | KeepNobody
    | KillWorkers
    | ForwardSignal
    | AwaitSignal
    | PostNotice
    | WithdrawNotice
    | PostStopNotice
    | AwaitVerdict
    | RequeueJob
    | LogLine
    | QueryStanding
    | ReportStatus
    | Collect
    | AddToReport
    | FailHung
    | FinalStep
)
