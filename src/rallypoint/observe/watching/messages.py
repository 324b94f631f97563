"""The messages between a watcher and the coordinator. Plain data.

A watcher is a session that is never a node: it is sent the state of the job, and may give commands. Laws:

1. Nodes report only when asked, that is, while there are watchers.
2. No time of day is sent: moments are given as seconds ago, by the coordinator's clock, so that no two clocks are
   compared.
3. A snapshot is of bounded size: of a large job it has the rows of a few nodes, and what is counted over all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import NamedTuple

import msgspec

from rallypoint.control.membership.state import Ledger
from rallypoint.control.protocol.codec import add_messages, decoder
from rallypoint.control.protocol.messages import (
    MAX_PART,
    CollectedPart,
    CollectKind,
    Fault,
    MissingNode,
    NodeReport,
    SessionEnded,
    Taken,
)
from rallypoint.control.protocol.validation import decoded, validated
from rallypoint.failures.cause import Ending

MAX_SNAPSHOT = 64 * 1024 * 1024
"""Bytes that a snapshot may have in all."""
SHOWN_NODES = 100
"""Nodes of a job up to which a snapshot has a row for each."""
PAGE_NODES = 1000
"""Rows in a snapshot that is one part of all of them (`WatchRequest.first`)."""


# The state of a job


class JobPhase(StrEnum):
    """The phase of a job. In the first three, no round runs."""

    WAITING = "waiting"
    """Fewer than `min_nodes` nodes have joined."""
    FORMING = "forming"
    """There are enough nodes, and others are given time to join."""
    HELD_BACK = "held back"
    """The next round is delayed by the back-off after failures."""
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class MemberState(StrEnum):
    """The role of a node in the job."""

    PARTICIPANT = "participant"
    WAITING = "waiting"
    SPARE = "spare"
    EXPECTED = "expected"
    """It was in the previous round, and has not come back yet."""


class NodeView(NamedTuple):
    """One node of a snapshot.

    `silent_for` is how many seconds ago it was last heard, -1 if that is not counted: it shares the coordinator's
    process, or has no session (`connected`). Its workers have the global ranks from `first_rank` on, -1 with no round.
    `quiet`: they have given no sign of life for a long time (`--hang-timeout`). `drained_by` is the operator that has
    asked the node to leave, which it has not yet done; empty if none has. `domain` as in `NodeInfo`; `waits_for` is
    what a node outside the round lacks to be in one, if ranks come in segments.
    """

    name: str
    host: str
    address: str
    pid: int
    state: MemberState
    connected: bool
    silent_for: float = -1.0
    group_rank: int = -1
    first_rank: int = -1
    workers: int = 0
    role: str = ""
    succeeded: bool = False
    report: NodeReport | None = None
    quiet: bool = False
    drained_by: str = ""
    domain: str = ""
    waits_for: str = ""


class Straggler(NamedTuple):
    """A rank that is `behind` the median by so many steps, on the node of this name."""

    rank: int
    node: str
    step: int
    behind: int


class Steps(NamedTuple):
    """The steps of all ranks that report theirs (`notices.progress`): the median, how many ranks report, how many are
    behind the median, and those that are furthest behind, the last one first.
    """

    median: int
    ranks: int
    late: int
    behind: tuple[Straggler, ...]


class Totals(NamedTuple):
    """What is counted over all nodes of a job, whether or not a snapshot has a row for each.

    Each node counts once in the first six, by its state; those of the first three are in the round. `quiet` and
    `reported` count nodes of the round again: those without a sign of life, and those that have reported on it.
    `workers` are those with known ranks. `least_step` and `most_step` are what nodes report as their progress, -1 if
    none does.
    """

    participant: int = 0
    unreachable: int = 0
    succeeded: int = 0
    waiting: int = 0
    spare: int = 0
    expected: int = 0
    quiet: int = 0
    reported: int = 0
    workers: int = 0
    least_step: int = -1
    most_step: int = -1
    in_place_of: tuple[str, ...] = ()
    """What was started on nodes, where that was torch's own launcher."""
    steps: Steps | None = None
    """None where fewer than two ranks report theirs."""
    command: str = ""
    """The command that has started the agent of group rank 0; empty if it is not known."""
    log_folder: str = ""
    """The folder of the logs on that node."""

    @property
    def in_round(self) -> int:
        """The nodes of the round."""
        return self.participant + self.unreachable + self.succeeded


class FailureView(NamedTuple):
    """A failure of the job: of a worker, or of a node (`rank` -1). Only the last one has its `traceback`."""

    seconds_ago: float
    round: int
    node: str
    host: str
    rank: int
    local_rank: int
    pid: int
    exitcode: int
    message: str
    traceback: str = ""


class EventKind(StrEnum):
    """The kinds of events of a whole job."""

    COORDINATOR_STARTED = "coordinator started"
    ROUND_STARTED = "round started"
    ROUND_ENDED = "round ended"
    NODE_WAITING = "node waiting"
    NODE_LOST = "node lost"
    JOB_PREEMPTED = "job preempted"
    HANG_FOUND = "hang found"
    COMMAND = "command"
    DRILL = "drill"
    JOB_ENDED = "job ended"


class JobEvent(NamedTuple):
    """Something that has happened; `number` grows by one. `text` is one sentence for people."""

    number: int
    seconds_ago: float
    kind: EventKind
    round: int
    text: str
    node: str = ""


class Snapshot(NamedTuple):
    """The state of a job at one moment.

    `phase_for` is for how many seconds the phase has lasted, `missing` how many nodes have to join until there are
    `min_nodes`, `expected` a few names of those, `backoff` the seconds for which the next round is still held back.
    `max_restarts` is -1 if it was not given. `age` is for how many seconds the job has run, as far as its nodes know.
    """

    job: str
    incarnation: str
    phase: JobPhase
    phase_for: float
    round: int
    min_nodes: int
    max_nodes: int
    missing: int
    expected: tuple[str, ...]
    nodes: tuple[NodeView, ...]
    """Of a job of more than `SHOWN_NODES`, those first with which something is the matter."""
    not_shown: int
    """Nodes without a row in `nodes`; in a part of all rows, those that follow."""
    totals: Totals
    ended_rounds: Ledger
    """Its failures are the restarts that failures have used: the one that has ended the job has used none."""
    max_restarts: int
    backoff: float
    failures: tuple[FailureView, ...]
    """The last ones, oldest first."""
    events: tuple[JobEvent, ...]
    """The last ones, oldest first."""
    detail: str = ""
    """How the job has ended, in a sentence; empty before."""
    ending: Ending | None = None
    """The kind of this end; None before, and for a success."""
    age: float = 0.0
    """For how many seconds the job has been known, to this coordinator or to a node that has told it; of one that has
    ended, how long it lasted.
    """
    removed: tuple[MissingNode, ...] = ()
    """A few of the nodes that have left since the last round and were not replaced."""
    changes: int = 0
    """A number that grows with each change of the job's state, with each command, and with the progress of nodes."""
    endpoint: str = ""
    """Where the coordinator was reached; made on the watcher's own side, never sent."""


class JobSummary(NamedTuple):
    """One job of a control plane that serves many; `phase_for`, `age` and `detail` are those of `Snapshot`."""

    job: str
    phase: JobPhase
    round: int
    nodes: int
    max_nodes: int
    phase_for: float = 0.0
    age: float = 0.0
    detail: str = ""
    restarts: int = 0
    """Those that failures have used."""


# Messages of a watcher


class WatchRequest(NamedTuple):
    """Request the state of the job. Answered by `SnapshotPart`s, or by `JobList` if the control plane serves many jobs
    and the greeting names none. A watcher has one request at a time: a later one takes the place of one that is not
    answered.

    Who follows says with `after` which state it knows (`Snapshot.changes`, 0 for none), and is answered when there is a
    newer one, or after a second; the end of the job is sent to it even between two requests. `first` is for the rows of
    all nodes of a large job: the snapshot that was sent last is sent again, with the next `PAGE_NODES` rows from this
    one on. `node` is for the row of one node, by its name, host, address or group rank.
    """

    after: int = -1
    first: int = -1
    node: str = ""

    @property
    def has_rows(self) -> bool:
        """Whether it is for given rows."""
        return self.first >= 0 or bool(self.node)


class ListRequest(NamedTuple):
    """Request all jobs of the control plane, those that have ended too, in the session of the only one that runs there:
    the greeting has named none. Answered by `JobList`.
    """


class RestartCommand(NamedTuple):
    """End the running round and begin another; no restart is used up. `by` is the operator, as user@host."""

    by: str


class DrainCommand(NamedTuple):
    """Make a node leave after its workers were notified, as before a preemption. `node` is its name, host, address or
    group rank."""

    by: str
    node: str


class StopCommand(NamedTuple):
    """End the job."""

    by: str


class ResizeCommand(NamedTuple):
    """Change the minimal and maximal number of nodes of future rounds; with `force`, also to more than there are."""

    by: str
    min_nodes: int
    max_nodes: int
    force: bool = False


class FaultCommand(NamedTuple):
    """Do `fault` on purpose to the worker of a global `rank`, or to a `node` (see `DrainCommand`), for `lasts` seconds
    where it ends by itself.
    """

    by: str
    fault: Fault
    rank: int = -1
    node: str = ""
    lasts: float = 0.0


class CollectCommand(NamedTuple):
    """Collect something from all nodes, or from the workers of some global `ranks`. Answered by `CollectedPart`s of
    each node, then by a `CommandReply`: if logs are followed, when the job has ended. See `CollectRequested`."""

    by: str
    kind: CollectKind
    ranks: tuple[int, ...] = ()
    lines: int = 0
    cursor: int = 0


Command = RestartCommand | DrainCommand | StopCommand | ResizeCommand | CollectCommand | FaultCommand
WatcherRequest = WatchRequest | Taken | Command


# Messages to a watcher


class SnapshotPart(NamedTuple):
    """A part of an encoded `Snapshot`."""

    data: bytes
    is_last: bool


class JobList(NamedTuple):
    """The jobs of a control plane that serves many, and those that have ended there, the newest first. A message has a
    part of them; a watcher's session puts them together.
    """

    jobs: tuple[JobSummary, ...]
    ended: tuple[JobSummary, ...] = ()
    is_last: bool = True


class CommandReply(NamedTuple):
    """Whether a command was done; if not, `detail` says why, and nothing was changed."""

    done: bool
    detail: str


WatcherNotification = SnapshotPart | JobList | CommandReply | CollectedPart

add_messages(
    26,
    WatchRequest,
    RestartCommand,
    DrainCommand,
    StopCommand,
    ResizeCommand,
    CollectCommand,
    SnapshotPart,
    JobList,
    CommandReply,
)
add_messages(52, FaultCommand, ListRequest)

_FromWatcher = WatcherRequest | ListRequest
decode_watcher_request: Callable[[bytes], _FromWatcher] = decoder(_FromWatcher)
"""Decode a message of a watcher in a session."""
_ToWatcher = WatcherNotification | SessionEnded
decode_watcher_notification: Callable[[bytes], _ToWatcher] = decoder(_ToWatcher)
"""Decode a message of the server in a watcher's session."""

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Snapshot)


def snapshot_parts(snapshot: Snapshot) -> tuple[SnapshotPart, ...]:
    """The messages that carry a snapshot."""
    data = _encode(snapshot)
    cuts = range(0, len(data), MAX_PART)
    return tuple(SnapshotPart(data[at : at + MAX_PART], at + MAX_PART >= len(data)) for at in cuts)


def job_list_parts(jobs: JobList) -> Iterator[JobList]:
    """The messages that carry a list of jobs, cut by their bytes: an id may have 4 KiB, and so may a sentence."""
    part: tuple[list[JobSummary], list[JobSummary]] = ([], [])
    size = 0
    for kind, summaries in enumerate((jobs.jobs, jobs.ended)):
        for summary in summaries:
            added = len(_encode(summary))
            if size + added > MAX_PART:
                yield JobList(tuple(part[0]), tuple(part[1]), is_last=False)
                part, size = ([], []), 0
            part[kind].append(summary)
            size += added
    yield JobList(tuple(part[0]), tuple(part[1]))


def decode_snapshot(data: bytes) -> Snapshot:
    """Decode the snapshot whose parts were put together.

    Raises:
        ValueError: it is not a snapshot.
    """
    return validated(decoded(_decoder, data))
