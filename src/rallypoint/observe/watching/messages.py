"""The messages between a watcher and the coordinator. Plain data.

A watcher is a session that belongs to no node: it receives the state of the job, and may send commands. Laws:

1. Nodes report only when asked, so only while there are watchers.
2. No time of day is sent: times are seconds ago on the coordinator's clock, so that no two clocks are compared.
3. A snapshot has a bounded size: for a large job, it has the rows of a few nodes, and counts over all.
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
"""The largest size of a snapshot in bytes."""
SHOWN_NODES = 100
"""For a job of up to this many nodes, a snapshot has a row for each."""
PAGE_NODES = 1000
"""Rows in one page of all nodes (`WatchRequest.first`)."""


# The state of a job


class JobPhase(StrEnum):
    """The phase of a job. In the first three, no round runs."""

    WAITING = "waiting"
    """Fewer than `min_nodes` nodes have joined."""
    FORMING = "forming"
    """There are enough nodes, and others have time to join."""
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
    """It was in the previous round, and has not returned yet."""


class NodeView(NamedTuple):
    """One node of a snapshot.

    `silent_for` is the seconds since its last message, -1 if not counted: it shares the coordinator's process, or has
    no session (`connected`). Its workers have the global ranks from `first_rank` on, -1 without a round. `quiet`: they
    have not been active for a long time (`--hang-timeout`). `drained_by` is the operator who asked the node to leave,
    until it does; empty for none. `domain` is as in `NodeInfo`; with segments, `waits_for` is what a node outside the
    round waits for.
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
    """A rank that is `behind` the median by this many steps, with the name of its node."""

    rank: int
    node: str
    step: int
    behind: int


class Steps(NamedTuple):
    """The steps of all ranks that report them (`notices.progress`): the median, the number of reporting ranks and of
    ranks behind the median, and the ranks furthest behind, the last one first.
    """

    median: int
    ranks: int
    late: int
    behind: tuple[Straggler, ...]


class Totals(NamedTuple):
    """Counts over all nodes of a job, including those without a row in the snapshot.

    Each node counts once in the first six, by its state; the first three are in the round. `quiet` and `reported` count
    nodes of the round again: inactive ones, and those that have reported. `workers` are those with known ranks.
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
    """The commands started on nodes, if torch's own launcher was."""
    steps: Steps | None = None
    """None if fewer than two ranks report them."""
    command: str = ""
    """The command that started the agent of group rank 0; empty if unknown."""
    log_folder: str = ""
    """The folder of that node's logs."""

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
    """An event; `number` grows by one. `text` is one sentence for people."""

    number: int
    seconds_ago: float
    kind: EventKind
    round: int
    text: str
    node: str = ""


class Snapshot(NamedTuple):
    """The state of a job at one moment.

    `phase_for` is the seconds in this phase, `missing` the number of nodes still needed for `min_nodes`, `expected` a
    few of their names, `backoff` the seconds left of the next round's delay. `max_restarts` is -1 if not given. `age`
    is the seconds that the job has run, as far as its nodes know.
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
    """In a job of more than `SHOWN_NODES`, nodes with problems come first."""
    not_shown: int
    """The number of nodes without a row in `nodes`; in a page of rows, those that follow."""
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
    """The kind of this end; None before it and for a success."""
    age: float = 0.0
    """The seconds since the job began, as known to this coordinator or reported by a node; for an ended job, its
    length.
    """
    removed: tuple[MissingNode, ...] = ()
    """A few of the nodes that left since the last round and were not replaced."""
    changes: int = 0
    """A number that grows with each change of the job's state, each command, and nodes' progress."""
    endpoint: str = ""
    """The place of the coordinator; set on the watcher's side, never sent."""


class JobSummary(NamedTuple):
    """One job of a control plane that serves many; for `phase_for`, `age` and `detail` see `Snapshot`."""

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


# Messages of a watcher


class WatchRequest(NamedTuple):
    """Request the state of the job. Answered by `SnapshotPart`s, or by `JobList` if the control plane serves many jobs
    and the greeting names none. A watcher has one request at a time: a later one replaces an unanswered one.

    A follower sets `after` to its known state (`Snapshot.changes`, 0 for none), and is answered when there is a newer
    one, or after a second; it gets the end of the job even between two requests. `first` requests a page of all nodes
    of a large job: the last snapshot is sent again with `PAGE_NODES` rows starting at this one. `node` requests the row
    of one node, by its name, host, address or group rank.
    """

    after: int = -1
    first: int = -1
    node: str = ""

    @property
    def has_rows(self) -> bool:
        """Whether it requests specific rows."""
        return self.first >= 0 or bool(self.node)


class ListRequest(NamedTuple):
    """Request all jobs of the control plane, including ended ones, in a session with its only running job whose
    greeting named none. Answered by `JobList`.
    """


class RestartCommand(NamedTuple):
    """End the running round and begin another, without using up a restart. `by` is the operator, as user@host."""

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
    """Change the minimum and maximum number of nodes in future rounds; with `force`, also to more than there are."""

    by: str
    min_nodes: int
    max_nodes: int
    force: bool = False


class FaultCommand(NamedTuple):
    """Cause `fault` in the worker of a global `rank` or in a `node` (see `DrainCommand`), for `lasts` seconds if it
    ends by itself.
    """

    by: str
    fault: Fault
    rank: int = -1
    node: str = ""
    lasts: float = 0.0


class CollectCommand(NamedTuple):
    """Collect data from all nodes, or from the workers of some global `ranks`. Answered by `CollectedPart`s of each
    node, then by a `CommandReply`; when following logs, at the end of the job. See `CollectRequested`.
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
    """The running and ended jobs of a control plane that serves many, the newest first. A message has a part of them; a
    watcher's session joins the parts.
    """

    jobs: tuple[JobSummary, ...]
    ended: tuple[JobSummary, ...] = ()
    is_last: bool = True


class CommandReply(NamedTuple):
    """Whether a command was carried out; if not, `detail` is the reason, and nothing has changed."""

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
"""Decode a watcher's message in a session."""
_ToWatcher = WatcherNotification | SessionEnded
decode_watcher_notification: Callable[[bytes], _ToWatcher] = decoder(_ToWatcher)
"""Decode the server's message in a watcher's session."""

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Snapshot)


def snapshot_parts(snapshot: Snapshot) -> tuple[SnapshotPart, ...]:
    """The messages for a snapshot."""
    data = _encode(snapshot)
    cuts = range(0, len(data), MAX_PART)
    return tuple(SnapshotPart(data[at : at + MAX_PART], at + MAX_PART >= len(data)) for at in cuts)


def job_list_parts(jobs: JobList) -> Iterator[JobList]:
    """The messages for a list of jobs, split by size: an id may have 4 KiB, and so may a sentence."""
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
        ValueError: it is not a snapshot.
    """
    return validated(decoded(_decoder, data))
