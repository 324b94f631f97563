"""The messages between a watcher and the coordinator. Plain data.

A watcher is a session that belongs to no node. It receives the state of the job, and may send commands. Laws:

1. Nodes report only on request, so only while watchers exist.
2. No time of day is sent: times are ages in seconds on the coordinator's clock, so that no two clocks are compared.
3. The size of a snapshot is limited: for a large job, it has the rows of a few nodes, and totals of all.
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
"""Maximum size of a snapshot in bytes."""
SHOWN_NODES = 100
"""Up to this many nodes, a snapshot has a row for each node."""
PAGE_NODES = 1000
"""Number of rows in one page of all nodes (`WatchRequest.first`)."""


# The state of a job


class JobPhase(StrEnum):
    """The phase of a job. In the first three, no round is running."""

    WAITING = "waiting"
    """Fewer than `min_nodes` nodes have joined."""
    FORMING = "forming"
    """Enough nodes have joined, and others have time to join."""
    HELD_BACK = "held back"
    """The next round is delayed by the back-off after failures."""
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class MemberState(StrEnum):
    """A node's role in the job."""

    PARTICIPANT = "participant"
    WAITING = "waiting"
    SPARE = "spare"
    EXPECTED = "expected"
    """It was in the previous round and has not returned yet."""


class NodeView(NamedTuple):
    """One node in a snapshot.

    `silent_for` is the number of seconds since its last message; -1 if it shares the coordinator's process or has no
    session (`connected`). Its workers' global ranks start at `first_rank`, -1 without a round. `quiet`: its workers
    have long been inactive (`--hang-timeout`). `drained_by` is the operator who asked the node to leave, until it
    does; empty for none. `domain` is as in `NodeInfo`. With segments, `waits_for` says what a node outside the round
    waits for.
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
    """A rank that is `behind` the median by this many steps, and its node's name."""

    rank: int
    node: str
    step: int
    behind: int


class Steps(NamedTuple):
    """The steps of all ranks that report them (`notices.progress`): the median, how many ranks report and how many are
    behind the median, and the ranks furthest behind, the last one first.
    """

    median: int
    ranks: int
    late: int
    behind: tuple[Straggler, ...]


class Totals(NamedTuple):
    """Totals of all nodes in a job, including those without a row in the snapshot.

    The first six count each node once, by its state; the first three are in the round. `quiet` and `reported` count
    nodes in the round again: inactive ones, and those that have reported. `workers` counts workers with known ranks.
    `least_step` and `most_step` are from nodes' reported progress, -1 for none.
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
    """The commands that nodes were started with, if torch's own launcher was used."""
    steps: Steps | None = None
    """None if fewer than two ranks report them."""
    command: str = ""
    """The command that started the agent with group rank 0; empty if unknown."""
    log_folder: str = ""
    """That node's log folder."""

    @property
    def in_round(self) -> int:
        """The number of nodes in the round."""
        return self.participant + self.unreachable + self.succeeded


class FailureView(NamedTuple):
    """A failure in the job: of a worker, or of a node (`rank` -1). Only the last failure has its `traceback`."""

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
    """The kinds of events that concern a whole job."""

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
    """An event; `number` increases by one. `text` is a readable sentence."""

    number: int
    seconds_ago: float
    kind: EventKind
    round: int
    text: str
    node: str = ""


class Snapshot(NamedTuple):
    """The state of a job at one time.

    `phase_for` is the number of seconds in this phase, `missing` how many nodes `min_nodes` still needs, `expected` a
    few of their names, `backoff` the rest of the next round's delay in seconds. `max_restarts` is -1 if not set. `age`
    is how many seconds the job has been running, as far as its nodes know.
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
    """In a job with more than `SHOWN_NODES` nodes, those with problems come first."""
    not_shown: int
    """The number of nodes without a row in `nodes`; in a page of rows, of those that follow."""
    totals: Totals
    ended_rounds: Ledger
    """Its failures are the restarts used: the failure that ended the job used none."""
    max_restarts: int
    backoff: float
    failures: tuple[FailureView, ...]
    """The newest ones, oldest first."""
    events: tuple[JobEvent, ...]
    """The newest ones, oldest first."""
    detail: str = ""
    """How the job ended, in a sentence; empty before."""
    ending: Ending | None = None
    """The kind of end; None before it and after a success."""
    age: float = 0.0
    """Seconds since the job started, as known to this coordinator or reported by a node; for an ended job, its
    duration.
    """
    removed: tuple[MissingNode, ...] = ()
    """A few of the nodes that left since the last round without being replaced."""
    changes: int = 0
    """A number that grows with each change of the job's state, each command, and nodes' progress."""
    endpoint: str = ""
    """The coordinator's address; set by the watcher, never sent."""


class JobSummary(NamedTuple):
    """One job on a control plane that serves many; for `phase_for`, `age` and `detail` see `Snapshot`."""

    job: str
    phase: JobPhase
    round: int
    nodes: int
    max_nodes: int
    phase_for: float = 0.0
    age: float = 0.0
    detail: str = ""
    restarts: int = 0
    """The number of restarts used by failures."""


# A watcher's messages


class WatchRequest(NamedTuple):
    """Request the state of the job. Answered by `SnapshotPart`s, or by `JobList` if the control plane serves many jobs
    and the greeting names none. A watcher has one request at a time: a new one replaces an unanswered one.

    A follower sets `after` to the state that it knows (`Snapshot.changes`, 0 for none). It gets an answer once a newer
    state exists, or after a second; it learns of the job's end even between requests. `first` requests a page of a
    large job's nodes: the last snapshot again, with `PAGE_NODES` rows from this one on. `node` requests the row of
    one node, by name, host, address or group rank.
    """

    after: int = -1
    first: int = -1
    node: str = ""

    @property
    def has_rows(self) -> bool:
        """Whether it requests specific rows."""
        return self.first >= 0 or bool(self.node)


class ListRequest(NamedTuple):
    """Request all jobs on the control plane, including ended ones, if the session's greeting named no job and only one
    is running. Answered by `JobList`.
    """


class RestartCommand(NamedTuple):
    """End the running round and start another, without using up a restart. `by` is the operator, as user@host."""

    by: str


class DrainCommand(NamedTuple):
    """Let a node notify its workers and leave, as before a preemption. `node` is its name, host, address or group
    rank.
    """

    by: str
    node: str


class StopCommand(NamedTuple):
    """End the job."""

    by: str


class ResizeCommand(NamedTuple):
    """Change the minimum and maximum number of nodes in future rounds; with `force`, even to more than exist."""

    by: str
    min_nodes: int
    max_nodes: int
    force: bool = False


class FaultCommand(NamedTuple):
    """Inject `fault` into the worker with a global `rank` or into a `node` (see `DrainCommand`), for `lasts` seconds if
    it ends on its own.
    """

    by: str
    fault: Fault
    rank: int = -1
    node: str = ""
    lasts: float = 0.0


class CollectCommand(NamedTuple):
    """Collect data from all nodes, or from the workers with some global `ranks`. Answered by each node's
    `CollectedPart`s, then by a `CommandReply`; when following logs, once the job ends. See `CollectRequested`.
    """

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
    """The running and ended jobs on a control plane that serves many, newest first. A message has a part of the list; a
    watcher's session joins the parts.
    """

    jobs: tuple[JobSummary, ...]
    ended: tuple[JobSummary, ...] = ()
    is_last: bool = True


class CommandReply(NamedTuple):
    """Whether a command was carried out. If not, `detail` is the reason, and nothing changed."""

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
"""Decodes a watcher's message in a session."""
_ToWatcher = WatcherNotification | SessionEnded
decode_watcher_notification: Callable[[bytes], _ToWatcher] = decoder(_ToWatcher)
"""Decodes the server's message in a watcher's session."""

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Snapshot)


def snapshot_parts(snapshot: Snapshot) -> tuple[SnapshotPart, ...]:
    """The messages for a snapshot."""
    data = _encode(snapshot)
    cuts = range(0, len(data), MAX_PART)
    return tuple(SnapshotPart(data[at : at + MAX_PART], at + MAX_PART >= len(data)) for at in cuts)


def job_list_parts(jobs: JobList) -> Iterator[JobList]:
    """Split a list of jobs into messages by size: an id may have 4 KiB, and so may a sentence."""
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
    """Decode a snapshot from its joined parts.

    Raises:
        ValueError: the data is not a snapshot.
    """
    return validated(decoded(_decoder, data))
