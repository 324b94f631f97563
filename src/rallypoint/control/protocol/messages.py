"""The messages between nodes and the coordinator. Plain data; `codec` encodes it for the wire.

A node sends requests and receives notifications. A join costs one request and one notification, however many nodes
there are: a notification contains the node's own place, and never the full membership. The first part is about
watchers, operators and hangs: the coordinator's requests to nodes, and their answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum

from rallypoint.base.light_typing import NamedTuple, Protocol
from rallypoint.control.membership.state import (
    NodeInfo,
    NodeOperation,
    NodeRange,
    NodeRanks,
    Outcome,
    Reason,
    Refusal,
    RoundEnd,
    Verdict,
)

MAX_PART = 48 * 1024
"""Maximum bytes per part of a message that is sent in parts."""
SIGNATURE_SIZE = 16
"""Bytes per signature, if frames are signed (`signing`)."""


class ReportRequested(NamedTuple):
    """Answer with a `NodeReport`: there is a watcher."""


class NodeReport(NamedTuple):
    """A node's answer to `ReportRequested`: its workers by local rank. All ages are in seconds.

    `progress` is the last step reported by a worker, -1 for none; without progress or output, `progress_age` and
    `output_ages` are -1.
    """

    round: int
    pids: tuple[int, ...] = ()
    progress: int = -1
    progress_age: float = -1.0
    output_ages: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    """The last step of each worker, -1 for none; empty if no worker reported one, or there are very many."""
    in_place_of: str = ""
    """The command that started torch's own launcher on the node, if it was used (`rallyctl shim`)."""
    standby: tuple[int, ...] = ()
    """Pids of its standby workers; `standby_ready` of them are waiting for a place in a round."""
    standby_ready: int = 0
    log_folder: str = ""
    """The folder of this node's logs; empty if it has none."""
    command: str = ""
    """The command that started the agent, with secrets masked; only from the node of group rank 0."""
    first_step: int = -1
    """The first step that a worker reported in this round, and its age; -1 if unknown."""
    first_step_age: float = -1.0
    step_before: int = -1
    """The last step that workers of this node reported in an earlier round, -1 for none."""
    age: float = 0.0
    """Seconds that the node has been in the job."""
    console_blocked: float = 0.0
    """Seconds for which this node's console has been blocked, making workers that write to it wait."""
    console_waiters: tuple[int, ...] = ()
    """Local ranks of the workers that are waiting for it."""
    ended: tuple[tuple[int, int, float], ...] = ()
    """The ended workers of the round: local rank, exit code and age."""
    remarks: tuple[str, ...] = ()
    """Remarks for people about running workers, one line each."""
    watching: tuple[tuple[str, float], ...] = ()
    """Parts of this agent that only watch the job, and the seconds that each has used on the agent's loop."""
    figures: tuple[tuple[str, float], ...] = ()
    """Figures of this node's features, by name."""


class CollectKind(StrEnum):
    """A kind of data to collect from nodes."""

    STACKS = "stacks"
    BUNDLE = "bundle"
    HANG = "hang"
    """Evidence of a hang, from all workers."""
    LOGS = "logs"
    """Workers' output."""


class CollectRequested(NamedTuple):
    """Collect something from a node's workers, or from those of the global `ranks`; answered by `CollectedPart`s.

    For logs, collect the last `lines` of each output, at most `most` bytes in total. A follower chooses a nonzero
    `cursor`, and gets an answer when more output exists, or after a while.
    """

    number: int
    kind: CollectKind
    ranks: tuple[int, ...] = ()
    lines: int = 0
    cursor: int = 0
    most: int = 0


class CollectedPart(NamedTuple):
    """A part of a node's collection. The coordinator adds the node's name and passes it on to the requester."""

    number: int
    """The number of the collection."""
    data: bytes
    is_last: bool
    node: str = ""
    is_first: bool = True
    """Whether this part replaces all earlier parts from the node."""


class Taken(NamedTuple):
    """Confirm that the receiver read everything that one node sent for this collection. Only then is more sent, so that
    no slow reader is cut off."""

    number: int


class DrainRequested(NamedTuple):
    """Notify this node's workers and leave, on an operator's request."""

    by: str


class Fault(StrEnum):
    """The fault that a drill causes (`rallyctl drill`)."""

    KILL_WORKER = "kill worker"
    KILL_AGENT = "kill agent"
    KILL_NODE = "kill node"
    """Lose a machine silently: the agent and its workers are stopped, and killed once they count as lost."""
    PAUSE_WORKER = "pause worker"
    PAUSE_NODE = "pause node"
    HANG = "hang"
    """Stop a worker until the hang is reported."""
    CUT = "cut"
    """Pass no data between a node and the control plane."""

    @property
    def is_of_worker(self) -> bool:
        """Whether the fault hits the worker with one rank, rather than a node."""
        return self in {Fault.KILL_WORKER, Fault.PAUSE_WORKER, Fault.HANG}


class FaultRequested(NamedTuple):
    """Cause this fault in the node or in its worker with the global `rank`, for at most `lasts` seconds: a drill."""

    by: str
    fault: Fault
    rank: int
    lasts: float


class OperatorAction(NamedTuple):
    """An operator's command was carried out: a line for every node's log. `size` is the new size of future rounds, if
    the command changed it: nodes remember it for a control plane that loses it."""

    by: str
    text: str
    size: NodeRange | None = None


class HangFound(NamedTuple):
    """All ranks of all nodes in `round` are quiet; each node's evidence about its workers will be collected."""

    round: int
    nodes: int


class CollectionEnded(NamedTuple):
    """Tell the node that reports a hang that no more parts follow. `silent` names a few nodes that did not answer, and
    `more` counts the others that did not, or were not asked."""

    number: int
    round: int
    silent: tuple[str, ...] = ()
    more: int = 0


class HangReport(NamedTuple):
    """Report about all workers of a hung job, as text. The reporting node sends it; all nodes receive it."""

    number: int
    round: int
    report: str


class CauseSought(NamedTuple):
    """Look for the failure that made a worker fail in `round`, and answer with `CauseClues`. The first node that needs
    to know sends this; all others receive it."""

    round: int


class CauseClues(NamedTuple):
    """Calls in which a node's remaining workers were: texts, each with its global ranks. Sent by asked nodes without a
    failure of their own, and passed on to the asking node."""

    round: int
    clues: tuple[tuple[str, tuple[int, ...]], ...]


NodeAnswer = NodeReport | CollectedPart | HangReport | Taken
"""A node's answers to these requests."""
HangNotification = HangFound | CollectedPart | CollectionEnded | HangReport


# Between nodes and the coordinator


class JoinRequest(NamedTuple):
    """Join; give up after `timeout` seconds, `waited` of which have already passed.

    An empty `node_info.address` means the session's address. `addresses` are those of the node's interfaces, from which
    its workers might connect to a store; None if unknown. With `keeps_place`, the node can get a place in later rounds
    without a request (`RoundEnded.keeps_place`).
    """

    node_info: NodeInfo
    timeout: float
    waited: float = 0.0
    addresses: tuple[str, ...] | None = None
    keeps_place: bool = False


class NextStore(NamedTuple):
    """Announce the port where the next round's worker store would be served. Sent by the node with group rank 0 in
    `round`."""

    round: int
    store_port: int


class LeaveRequest(NamedTuple):
    """Leave the job. With `wants_reply`, each request is answered by `LeaveReply`. `why` is for the other nodes:
    "drained by ann@login", empty for a signal. `ended_with_0`: see `Exit`."""

    wants_reply: bool = False
    why: str = ""
    ended_with_0: bool = False


class Heartbeat(NamedTuple):
    """Show that the node is alive. The coordinator sends the same back (in a large job, for every second one), so each
    side knows that the other is alive. In an answer, `number` counts the heartbeats since the last count; all earlier
    notifications were sent. It is 0 while a notification is pending."""

    number: int = 1


class ProgressRequest(NamedTuple):
    """Request the progress of the rendezvous. Answered by `Progress`."""


class ConfirmRequest(NamedTuple):
    """Ask whether the coordinator still counts on this node. Answered by `Confirmed` with the same number."""

    number: int


class ResumeRequest(NamedTuple):
    """A node's state, sent when a lost link is open again. It fills a new coordinator.

    `incarnation` names the last coordinator that sent it anything. `round` is the last round in which it had a place
    (-1 for none), and `origin` the coordinator that completed that round. `round_over`: the node knows that the round
    has ended. `last_ended_round` is the newest round that the node knows has ended (-1 for none), `failures` the number
    of used restarts that it knows about. `control_rank` and `size`: see `Placement`. `succeeded`: see `NodesSucceeded`.
    """

    incarnation: str
    node_info: NodeInfo
    round: int = -1
    group_rank: int = -1
    group_world_size: int = 0
    control_rank: int = -1
    failures: int = 0
    round_over: bool = True
    last_ended_round: int = -1
    joining: bool = False
    origin: str = ""
    size: NodeRange | None = None
    succeeded: tuple[tuple[int, int], ...] = ()


Request = (
    JoinRequest
    | NextStore
    | LeaveRequest
    | NodeOperation
    | Heartbeat
    | ProgressRequest
    | ConfirmRequest
    | ResumeRequest
    | NodeAnswer
    | CauseSought
    | CauseClues
)


class Placement(NamedTuple):
    """A node's own place in a complete round, and everything that its workers need.

    `restarts` is the number of restarts used so far, `max_restarts` the number allowed (-1 if unset), `control_rank`
    the group rank of the node whose agent hosts the control plane, -1 for none. `origin` is the incarnation of the
    coordinator that completed the round; with the round's number it identifies the round permanently. `progress` is the
    highest step reported before by the job's workers, -1 for none. `size` is the number of nodes in a round, if an
    operator changed it. With `restart_workers`, no worker of the previous round continues in its process, because some
    worker on some node cannot.
    """

    round: int
    group_rank: int
    group_world_size: int
    ranks: NodeRanks
    store_address: str
    store_port: int
    restarts: int
    control_rank: int = -1
    origin: str = ""
    max_restarts: int = -1
    progress: int = -1
    size: NodeRange | None = None
    restart_workers: bool = False


class Placed(NamedTuple):
    """The round is complete, with this place for the node."""

    placement: Placement


class StorePeers(NamedTuple):
    """Addresses of a round's workers, sent to its store's host before its placement; many come in parts.

    `is_first_part` starts a new list. `reason_unrestricted` is why workers might have other addresses; empty if they
    cannot.
    """

    addresses: tuple[str, ...]
    is_first_part: bool = True
    reason_unrestricted: str = ""


class RoundEnded(NamedTuple):
    """The node's round has ended. Join again, unless `keeps_place` is set: then `Placed` follows without a request,
    with the same node info as in that round and the store from `NextStore`.
    """

    end: RoundEnd
    keeps_place: bool = False


class NodesSucceeded(NamedTuple):
    """The nodes that succeeded in `round`, by group rank: ranges with both ends, in order.

    Sent now and then while other nodes are still working. Sent at once if they include the coordinator's host:
    otherwise this knowledge would be lost with it.
    """

    round: int
    succeeded: tuple[tuple[int, int], ...]


def ranks_in(ranges: Sequence[tuple[int, int]], world_size: int) -> Iterator[int]:
    """The ranks below `world_size` in ranges from another machine, each once."""
    following = 0
    for first, last in ranges:
        yield from range(max(first, following), min(last + 1, world_size))
        following = max(following, last + 1)


class NodesWaiting(NamedTuple):
    """The number of nodes waiting to join after `round`; `names` lists a few of them."""

    round: int
    waiting: int
    names: tuple[str, ...] = ()


class Preempted(NamedTuple):
    """`node` will be preempted in `seconds`; `why` is the reason, if known. `round` should end cleanly before that.

    With `whole_job` the job then ends, because `node` was notified as `why` describes.
    """

    round: int
    node: str
    seconds: float
    whole_job: bool = False
    why: str = ""


class JobEnded(NamedTuple):
    """The job has ended. `is_delegate`: this node acts for the whole job. `is_spare`: this node waited as a spare until
    the end. After a success, spares receive a `JoinRefused` instead.
    """

    verdict: Verdict
    is_delegate: bool = False
    is_spare: bool = False


class ConfigDifference(NamedTuple):
    """A setting in which a node differs from the job: its name, and both values.

    `job_value_applies`: the job's value is in effect.
    """

    what: str
    own_value: str
    job_value: str
    job_value_applies: bool = True

    def sentence(self, who: str) -> str:
        """Form a sentence for people about `who`."""
        holds = ", which applies" if self.job_value_applies else ""
        return (
            f"{who} was started with {self.what}{self.own_value}, but the job with {self.what}{self.job_value}{holds}"
        )


class ConfigDiffers(NamedTuple):
    """This node, named `node`, was started with other settings than the job. Both sides log it."""

    node: str
    differences: tuple[ConfigDifference, ...]


class SessionEnded(NamedTuple):
    """The last message of a session, which the control plane ends for the reason in `detail`. `is_permanent`: it would
    also end each later session of this node."""

    detail: str
    is_permanent: bool = False


class MissingNode(NamedTuple):
    """A node that left without a replacement: its name, the reason, and how many seconds ago. `ended_with_0`: see
    `RemovedNode`."""

    name: str
    reason: Reason
    seconds_ago: float
    ended_with_0: bool = False


class Progress(NamedTuple):
    """Progress of the rendezvous as data, which `observe.rendezvous_log` turns into text; with a few names at most."""

    round: int
    complete: bool
    joined: int
    min_nodes: int
    max_nodes: int
    expected: tuple[str, ...]
    """The nodes still expected, if known."""
    spare: bool
    backoff: float = 0.0
    """Seconds by which this round is delayed, after failures without progress or by a new control plane."""
    members: tuple[str, ...] = ()
    """Nodes that have joined."""
    removed: tuple[MissingNode, ...] = ()
    starts_in: float = -1.0
    """Seconds until the round starts with the joined nodes; negative if other nodes must join."""
    ends_in: float = -1.0
    """Seconds until the rendezvous fails; negative if it has no such deadline."""
    gave_up_by: str = ""
    """The node whose deadline passed, so that the rendezvous failed."""
    waited: float = 0.0
    """How many seconds that node waited."""
    reports: bool = False
    """Whether this waiting node logs the progress."""
    segment: int = 1
    """The number of nodes in a segment; above 1, `joined` counts only those of whole segments."""


class JoinRefused(NamedTuple):
    """The join failed; `detail` is the reason or, after a timeout, `progress` shows how far the rendezvous was."""

    refusal: Refusal
    detail: str
    progress: Progress | None = None


class ProgressText(NamedTuple):
    """The progress of the rendezvous as text; created on the node's side, never sent.

    `warning`: this node logs it. `live` is a short form for a line that is rewritten: the texts before and after the
    elapsed time. `is_short`: more nodes must join before there can be a round.
    """

    text: str
    warning: bool
    live: tuple[str, str] = ("", "")
    is_short: bool = False


class LeaveReply(NamedTuple):
    """The state of the job after this node left: whether it continues, on how many nodes, or how it ended."""

    goes_on: bool
    others: int
    outcome: Outcome | None = None


class Confirmed(NamedTuple):
    """The answer to the `ConfirmRequest` with this number, sent after all earlier notifications: if the node has not
    received a round's end, that round was still running when the request arrived. Valid for `valid_for` seconds after
    the request was sent: once its own lease in etcd ends, an elected coordinator cannot know what another one does."""

    number: int
    valid_for: float = math.inf


class LinkDown(NamedTuple):
    """The control plane is unreachable for now; created on the node's side, never sent. `brief` counts the consecutive
    sessions, up to this one, that ended right after they were opened.
    """

    detail: str
    brief: int = 0


class LinkOpened(NamedTuple):
    """The control plane was reached for the first time; created on the node's side, never sent."""


class LinkUp(NamedTuple):
    """The control plane is reachable again; created on the node's side, never sent.

    `join_lost`: the waiting join went to a coordinator that no longer exists, which may have given it a place. It is
    not sent again, and the node must join anew. `brief`: see `LinkDown`.
    """

    join_lost: bool = False
    brief: int = 0


class LinkLost(NamedTuple):
    """The control plane is lost permanently; created on the node's side, never sent.

    `error` is the exception of a third party's handler or backend, which its user must see.
    """

    detail: str
    error: BaseException | None = None


Notification = (
    Placed
    | StorePeers
    | RoundEnded
    | NodesWaiting
    | NodesSucceeded
    | Preempted
    | JobEnded
    | JoinRefused
    | Progress
    | ProgressText
    | LeaveReply
    | Confirmed
    | ConfigDiffers
    | SessionEnded
    | Heartbeat
    | ReportRequested
    | CollectRequested
    | DrainRequested
    | FaultRequested
    | OperatorAction
    | HangNotification
    | CauseSought
    | CauseClues
    | LinkDown
    | LinkOpened
    | LinkUp
    | LinkLost
)

Deliver = Callable[[Notification], None]
"""Called from any thread, in the order of events. Must not block, nor send in this thread (`Turns`)."""


class Link(Protocol):
    """One node's link to the control plane: takes requests, and passes notifications to its `Deliver`.

    The coordinator's host has a link without a socket (`LocalLink`), other nodes have one over TCP (`TcpLink`).
    Shared-state backends have one that runs the rules itself (`SharedStateLink`).
    """

    @property
    def address(self) -> str | None:
        """This node's address on the way to the control plane; None until `LinkOpened`."""

    @property
    def lease(self) -> float:
        """Seconds of silence after which this node counts as lost."""

    @property
    def confirmed_at(self) -> float:
        """When the newest answered heartbeat was sent, on `BOOT_CLOCK`: the other nodes count on this one until a lease
        later. Minus infinity for none."""

    def send(self, request: Request) -> None:
        """Send a request. Never blocks; a lost link delivers `LinkLost`."""

    def close(self) -> None:
        """End the session: other nodes then count this node as gone. Idempotent; nothing is delivered afterwards."""
