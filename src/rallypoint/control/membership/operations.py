"""The operations that a node can request, and how they end. Plain data.

Join, exit, close and keep-alive are torch's (contract section 4.6); fail, succeed and drain are ours. A `deadline` is a
moment on the clock of the part that runs the operation: the coordinator, or a shared-state link.
"""

from __future__ import annotations

import math
from enum import Enum, StrEnum, auto

from rallypoint.base.light_typing import NamedTuple
from rallypoint.control.membership.state import NodeInfo, NodeRange, Reason
from rallypoint.failures.cause import Cause


class Join(NamedTuple):
    """Take part in a round. Done when a round with this node in it is complete.

    `asked_at` is when it was requested, `since` how many rendezvous had been abandoned until then.
    """

    node_info: NodeInfo
    deadline: float = math.inf
    asked_at: float = 0.0
    since: int = 0


class Exit(NamedTuple):
    """Take no part any more. `reason` distinguishes a departure from a loss noticed elsewhere, `detail` says how."""

    reason: Reason = Reason.DEPARTED
    detail: str = ""
    deadline: float = math.inf


class Fail(NamedTuple):
    """A worker of this node failed in `round`; the job may be restarted `max_restarts` times."""

    round: int
    cause: Cause
    max_restarts: int


class Succeed(NamedTuple):
    """All workers of this node have succeeded in `round`."""

    round: int


class Drain(NamedTuple):
    """End `round` in order, because the membership will change; with `needs_consent`, as soon as all its nodes
    agree."""

    round: int
    needs_consent: bool = False


class Preempt(NamedTuple):
    """This node will be taken away `seconds` from now, and takes no part in a round after `round`."""

    round: int
    seconds: float


class PreemptJob(NamedTuple):
    """The whole job will be taken away `seconds` from now: it ends when all workers have saved, or when that is over.

    `why` says how this node was told, for people, as in "received SIGUSR2"; or how `who` was told, if this node only
    repeats it to a coordinator that may not have received it.
    """

    seconds: float
    why: str = ""
    who: str = ""


class RecordProgress(NamedTuple):
    """Workers of this node have reached `step` in `round`, which is new to the job as far as this node knows.

    `step` is -1 if they report progress without a number. With `made` false nothing is new: it only says that this node
    reports progress, or, once the round is over, how far its workers had come.
    """

    round: int
    step: int = -1
    made: bool = True


class ReportQuiet(NamedTuple):
    """No worker of this node has given a sign of life in `round` for a long time; or, if it is not `quiet`, one has
    again. The node decides what a long time is.
    """

    round: int
    quiet: bool = True


class Close(NamedTuple):
    """End the job on request; `detail` says whose."""

    deadline: float = math.inf
    detail: str = ""


class Restart(NamedTuple):
    """End `round` because an operator asks, at no cost to the budget of restarts."""

    round: int


class Resize(NamedTuple):
    """Change the number of nodes of future rounds."""

    size: NodeRange


class KeepLeaseAlive(NamedTuple):
    """Report that this node is alive."""

    deadline: float = math.inf


NodeOperation = Fail | Succeed | Drain | Preempt | PreemptJob | RecordProgress | ReportQuiet | Close
"""The operations that a node sends unchanged."""

Operation = NodeOperation | Join | Exit | Restart | Resize | KeepLeaseAlive


class Stop(Enum):
    """Why `rules.step` changes nothing."""

    DONE = auto()
    WAIT = auto()
    """Nothing can be done now: try again when the state or the time has changed."""


class Refusal(StrEnum):
    """Why an operation, most often a join, has failed."""

    CLOSED = "closed"
    TIMEOUT = "timeout"
    RANK_TAKEN = "rank taken"
    SPARE_NOT_NEEDED = "spare not needed"
