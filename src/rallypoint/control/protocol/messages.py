"""The messages between nodes and the coordinator. Plain data; `codec` encodes it for the wire.

A node sends requests, and receives notifications. One join costs one request and one notification, whatever the number
of nodes: a notification holds the node's own place and never the full membership. The first part is about watchers,
operators and hangs: what the coordinator asks nodes on their behalf, and the answers.
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
"""Bytes in one part of a message that is sent in parts."""
SIGNATURE_SIZE = 16
"""Bytes of a frame that its signature takes, if frames are signed (`signing`)."""


class ReportRequested(NamedTuple):
    """There is a watcher: answer with a `NodeReport`."""


class NodeReport(NamedTuple):
    """A node's answer to `ReportRequested`: its workers by local rank. All ages are in seconds.

    `progress` is the last step that a worker has reported, -1 if none has; `progress_age` and `output_ages` are -1 if
    there was none.
    """

    round: int
    pids: tuple[int, ...] = ()
    progress: int = -1
    progress_age: float = -1.0
    output_ages: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    """The last step of each worker, -1 if it has reported none; empty if none has, or there are very many."""
    in_place_of: str = ""
    """What was started on that node, if that was torch's own launcher (`rallyctl shim`)."""
    standby: tuple[int, ...] = ()
    """The pids of its standby workers, of which `standby_ready` wait for a place in a round."""
    standby_ready: int = 0
    log_folder: str = ""
    """The folder of this node's logs; empty if it has none."""
    command: str = ""
    """The command that has started the agent, secrets masked; from the node of group rank 0 only."""
    first_step: int = -1
    """The first step that a worker has reported in this round, and how long ago: -1 if that is not known."""
    first_step_age: float = -1.0
    step_before: int = -1
    """The last step that workers of this node had reported in an earlier round, -1 for none."""
    age: float = 0.0
    """For how long the node has had a part in the job."""
    console_blocked: float = 0.0
    """For how many seconds this node's console has taken nothing, so that workers that write to it wait."""
    console_waiters: tuple[int, ...] = ()
    """Local ranks of the workers that wait for it."""
    ended: tuple[tuple[int, int, float], ...] = ()
    """The workers of the round that have ended: local rank, exit code and age."""
    remarks: tuple[str, ...] = ()
    """What a person should know of workers that run, a line each."""
    watching: tuple[tuple[str, float], ...] = ()
    """What only watches the job in this agent, and the seconds that it has taken of the agent's loop so far."""
    figures: tuple[tuple[str, float], ...] = ()
    """Numbers of features that this node has, by name."""


class CollectKind(StrEnum):
    """What can be collected from nodes."""

    STACKS = "stacks"
    BUNDLE = "bundle"
    HANG = "hang"
    """The evidence of a hang, of all workers."""
    LOGS = "logs"
    """What workers have written."""


class CollectRequested(NamedTuple):
    """Collect something from a node's workers, or from those of the global `ranks`; answered by `CollectedPart`s.

    Of logs the last `lines` of each output, of `most` bytes in all. Whoever follows them has drawn a `cursor`, not 0,
    and is answered when there is more for it, or after a while.
    """

    number: int
    kind: CollectKind
    ranks: tuple[int, ...] = ()
    lines: int = 0
    cursor: int = 0
    most: int = 0


class CollectedPart(NamedTuple):
    """A part of a node's collection. Sent by the node, and on to the requester with the node's name filled in."""

    number: int
    """The number of the collection."""
    data: bytes
    is_last: bool
    node: str = ""
    is_first: bool = True
    """Whether it takes the place of all that the node has sent before."""


class Taken(NamedTuple):
    """The receiver has read all that one node has sent for the collection of that number. Only then is more sent, so
    that nobody is cut off for reading slowly.
    """

    number: int


class DrainRequested(NamedTuple):
    """An operator asks this node to leave, after its workers were notified."""

    by: str


class Fault(StrEnum):
    """What a drill does to a job (`rallyctl drill`)."""

    KILL_WORKER = "kill worker"
    KILL_AGENT = "kill agent"
    KILL_NODE = "kill node"
    """A machine that is lost without a word: agent and workers stop, and are killed when they were counted as lost."""
    PAUSE_WORKER = "pause worker"
    PAUSE_NODE = "pause node"
    HANG = "hang"
    """A worker is stopped until the hang is reported."""
    CUT = "cut"
    """Nothing passes between a node and the control plane."""

    @property
    def is_of_worker(self) -> bool:
        """Whether it befalls the worker of one rank; otherwise a node."""
        return self in {Fault.KILL_WORKER, Fault.PAUSE_WORKER, Fault.HANG}


class FaultRequested(NamedTuple):
    """A drill: the node does this to itself, or to its worker of a global `rank`, at most for `lasts` seconds."""

    by: str
    fault: Fault
    rank: int
    lasts: float


class OperatorAction(NamedTuple):
    """An operator's command was carried out: a line for the log of every node. `size` is that of future rounds, if the
    command has changed it: nodes keep it for a control plane that has lost it.
    """

    by: str
    text: str
    size: NodeRange | None = None


class HangFound(NamedTuple):
    """All ranks of all nodes of `round` are quiet; each node's evidence about its workers is collected next."""

    round: int
    nodes: int


class CollectionEnded(NamedTuple):
    """For the node that reports a hang: no more parts follow. `silent` are the names of a few nodes that have not
    answered, and `more` is how many others have not, or were not asked.
    """

    number: int
    round: int
    silent: tuple[str, ...] = ()
    more: int = 0


class HangReport(NamedTuple):
    """The text of a report about all workers of a job that hangs. Sent by the reporting node; then to all."""

    number: int
    round: int
    report: str


class CauseSought(NamedTuple):
    """A worker has failed in `round` as a consequence of another failure: look for that, and answer with `CauseClues`.
    Sent by the first node that needs to know, and on to all others.
    """

    round: int


class CauseClues(NamedTuple):
    """What workers of a node were in that had not ended: texts, each with its global ranks. Sent by nodes that were
    asked and have found no failure of their own, and on to the node that asks.
    """

    round: int
    clues: tuple[tuple[str, tuple[int, ...]], ...]


NodeAnswer = NodeReport | CollectedPart | HangReport | Taken
"""The answers of a node to such requests."""
HangNotification = HangFound | CollectedPart | CollectionEnded | HangReport


# Between nodes and the coordinator


class JoinRequest(NamedTuple):
    """Take part; give up after `timeout` seconds, `waited` of which have passed already.

    An empty `node_info.address` stands for the session's own. `addresses` are those of the node's interfaces, from
    which its workers may connect to a store; None if they are not known. With `keeps_place` the node may be given a
    place in later rounds without a request (`RoundEnded.keeps_place`).
    """

    node_info: NodeInfo
    timeout: float
    waited: float = 0.0
    addresses: tuple[str, ...] | None = None
    keeps_place: bool = False


class NextStore(NamedTuple):
    """From the node of group rank 0 in `round`: the port at which it would serve the next round's worker store."""

    round: int
    store_port: int


class LeaveRequest(NamedTuple):
    """Take no part any more. With `wants_reply` it is answered by `LeaveReply`, each time it is sent. `why` is for the
    others: "drained by ann@login", empty for a signal. `ended_with_0`: see `Exit`.
    """

    wants_reply: bool = False
    why: str = ""
    ended_with_0: bool = False


class Heartbeat(NamedTuple):
    """The node is alive. The coordinator sends the same back, in a large job to every second one: each side knows that
    the other is alive. `number` is how many heartbeats, since the last ones that were counted, this is the answer to,
    after all that the node was to be told before; 0 if something is still to be told.
    """

    number: int = 1


class ProgressRequest(NamedTuple):
    """Request the progress of the rendezvous. Answered by `Progress`."""


class ConfirmRequest(NamedTuple):
    """Does the coordinator still count on this node? Answered by `Confirmed` with the same number."""

    number: int


class ResumeRequest(NamedTuple):
    """What a node holds, sent again when its link was lost and is open again; it fills a new coordinator.

    `incarnation` names the last coordinator that it has heard from. `round` is the last round in which it had a place
    (-1 for none), `origin` the coordinator that has completed it, `round_over` says whether the
    node knows that this round has ended, `last_ended_round` is the newest round of which it knows that (-1 for none),
    `failures` the number of restarts that it knows the job to have used. `control_rank` and `size`: see `Placement`.
    `succeeded`: see `NodesSucceeded`.
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
    """A node's own place in a complete round, and all that its workers need.

    `restarts` is the number of restarts that the job has used so far, `max_restarts` how many it may use (-1 if not
    given), `control_rank` the group rank of the node whose agent hosts the control plane, -1 if none does. `origin` is
    the incarnation of the coordinator that has completed the round; together with its number it identifies the round
    permanently. `progress` is the highest step that workers of the job had reported before, -1 for none. `size` is the
    number of nodes of a round, if an operator has changed that. With `restart_workers` no worker of the previous round
    continues in its process, since on some node one cannot.
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
    """The round is complete and this is your place in it."""

    placement: Placement


class StorePeers(NamedTuple):
    """The addresses of a round's workers: for the host of its store, before its placement, in parts if they are many.

    `is_first_part` starts a new list; `reason_unrestricted` says why they may have other addresses, empty if they do
    not.
    """

    addresses: tuple[str, ...]
    is_first_part: bool = True
    reason_unrestricted: str = ""


class RoundEnded(NamedTuple):
    """The round that you took part in is over; join again, unless you have by this: with `keeps_place` `Placed` follows
    without a request, for the same node information as in that round, and the store that `NextStore` has told.
    """

    end: RoundEnd
    keeps_place: bool = False


class NodesSucceeded(NamedTuple):
    """The nodes that have succeeded in `round`, by group rank: ranges with both ends, in order.

    It is sent now and then while others still work, and at once where the node that hosts the coordinator is among
    them: what only the coordinator knows would go with it.
    """

    round: int
    succeeded: tuple[tuple[int, int], ...]


def ranks_in(ranges: Sequence[tuple[int, int]], world_size: int) -> Iterator[int]:
    """The ranks below `world_size` in ranges that another machine has sent, each once."""
    following = 0
    for first, last in ranges:
        yield from range(max(first, following), min(last + 1, world_size))
        following = max(following, last + 1)


class NodesWaiting(NamedTuple):
    """The number of nodes that wait to join after `round`; `names` has a few of them."""

    round: int
    waiting: int
    names: tuple[str, ...] = ()


class Preempted(NamedTuple):
    """`node` will be taken away in `seconds`, as `why` says if that is known: `round` should end in order before that.

    With `whole_job` the job then ends, because `node` was told so in the way that `why` says.
    """

    round: int
    node: str
    seconds: float
    whole_job: bool = False
    why: str = ""


class JobEnded(NamedTuple):
    """The job has ended. `is_delegate`: this node does what one node has to do for the job. `is_spare`: this node has
    waited as a spare until then. After a success spares receive a `JoinRefused` instead.
    """

    verdict: Verdict
    is_delegate: bool = False
    is_spare: bool = False


class ConfigDifference(NamedTuple):
    """A setting in which a node differs from the job: its name, and both values.

    `job_value_applies` says whether the job's value is the one in effect.
    """

    what: str
    own_value: str
    job_value: str
    job_value_applies: bool = True

    def sentence(self, who: str) -> str:
        """A sentence for people about `who`."""
        holds = ", which holds" if self.job_value_applies else ""
        return f"{who} was started with {self.what}{self.own_value}, the job with {self.what}{self.job_value}{holds}"


class ConfigDiffers(NamedTuple):
    """This node, with the name `node`, was started with other settings than the job; both sides log it."""

    node: str
    differences: tuple[ConfigDifference, ...]


class SessionEnded(NamedTuple):
    """The control plane ends this session, for the reason in `detail`; its last message. `is_permanent`: it would end
    each further session of this node in the same way.
    """

    detail: str
    is_permanent: bool = False


class MissingNode(NamedTuple):
    """A node that left without a replacement: its name, why it left, and how many seconds ago. `ended_with_0`: see
    `RemovedNode`.
    """

    name: str
    reason: Reason
    seconds_ago: float
    ended_with_0: bool = False


class Progress(NamedTuple):
    """Progress of the rendezvous as facts, for `observe.rendezvous_log` to word; with a few names at most."""

    round: int
    complete: bool
    joined: int
    min_nodes: int
    max_nodes: int
    expected: tuple[str, ...]
    """The nodes still expected, as far as they are known."""
    spare: bool
    backoff: float = 0.0
    """Seconds for which this round is held back: after failures without progress, or by a new control plane."""
    members: tuple[str, ...] = ()
    """The nodes that have joined."""
    removed: tuple[MissingNode, ...] = ()
    starts_in: float = -1.0
    """Seconds until the round starts with the nodes that have joined; negative if others have to join."""
    ends_in: float = -1.0
    """Seconds until the rendezvous fails; negative if it does not by the passing of time."""
    gave_up_by: str = ""
    """The node whose time is over, so that the rendezvous has failed."""
    waited: float = 0.0
    """For how many seconds that node has waited."""
    reports: bool = False
    """Whether this node is the one of the waiting nodes that logs it."""
    segment: int = 1
    """How many nodes of one domain are a segment; above 1, `joined` are those of whole ones."""


class JoinRefused(NamedTuple):
    """The join failed; `detail` says why, or, if it timed out, `progress` how far the rendezvous was."""

    refusal: Refusal
    detail: str
    progress: Progress | None = None


class ProgressText(NamedTuple):
    """The progress of the rendezvous, as text; made on the node's own side, never sent.

    `warning`: this node is the one to log it. `live` is a short form for a line that is rewritten: the text before the
    elapsed time, and the text after it. `is_short`: more nodes have to join before there can be a round.
    """

    text: str
    warning: bool
    live: tuple[str, str] = ("", "")
    is_short: bool = False


class LeaveReply(NamedTuple):
    """The state of the job after this node has left: whether it continues, on how many nodes, how it has ended."""

    goes_on: bool
    others: int
    outcome: Outcome | None = None


class Confirmed(NamedTuple):
    """The answer to the `ConfirmRequest` of this number, after all that this node was to be told before: a round that
    it has heard no end of still stood when the request came. It holds for `valid_for` seconds from when the request
    was sent: an elected coordinator cannot know what another one does once its own lease in etcd has ended.
    """

    number: int
    valid_for: float = math.inf


class LinkDown(NamedTuple):
    """The control plane cannot be reached for now; made on the node's own side, never sent. `brief` counts the
    sessions in a row, up to this one, that ended right after they were opened.
    """

    detail: str
    brief: int = 0


class LinkOpened(NamedTuple):
    """The control plane was reached for the first time; made on the node's own side, never sent."""


class LinkUp(NamedTuple):
    """The control plane can be reached again; made on the node's own side, never sent.

    `join_lost`: the waiting join was sent to a coordinator that no longer exists, which may have given it a place; it
    is not sent again, and the node has to join anew. `brief`: see `LinkDown`.
    """

    join_lost: bool = False
    brief: int = 0


class LinkLost(NamedTuple):
    """The control plane is lost permanently; made on the node's own side, never sent.

    `error` is what a third party's handler or backend has raised, and what its user must see.
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
    """One node's link to the control plane: it takes requests, and passes notifications to its `Deliver`.

    The node that hosts the coordinator has one without a socket (`LocalLink`), others one over TCP (`TcpLink`);
    shared-state backends have one that runs the core itself (`SharedStateLink`).
    """

    @property
    def address(self) -> str | None:
        """This node's address towards the control plane; None until that has been reached, which `LinkOpened` tells."""

    @property
    def lease(self) -> float:
        """Seconds of silence after which the others count this node as lost."""

    @property
    def confirmed_at(self) -> float:
        """When the newest heartbeat was sent that was answered, on `BOOT_CLOCK`: until a lease after that, the others
        count on this node. Minus infinity if there was none.
        """

    def send(self, request: Request) -> None:
        """Send a request. Never blocks; a lost link delivers `LinkLost`."""

    def close(self) -> None:
        """End the session: for the others, the node is gone. Idempotent; nothing is delivered afterwards."""
