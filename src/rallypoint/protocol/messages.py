"""What a node and the coordinator say to each other. Plain data; `codec` puts it on the wire.

A node sends requests, and is sent notifications. One join costs one request and one notification, whatever the number
of nodes: a notification holds the node's own place and never the roll.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from rallypoint.base.light_typing import NamedTuple, Protocol
from rallypoint.membership.operations import NodeOperation
from rallypoint.membership.state import NodeId, NodeInfo, NodeRange, Outcome, Reason, RoundEnd, Verdict
from rallypoint.protocol.operator_messages import (
    CollectRequested,
    DrainRequested,
    HangNotification,
    NodeAnswer,
    OperatorAction,
    ReportRequested,
)
from rallypoint.ranks.assign import NodeRanks


class JoinRequest(NamedTuple):
    """Take part; give up after `timeout` seconds, having waited for `waited` already.

    An empty `node_info.address` stands for the session's own. `addresses` are those of the node's interfaces, from
    which its workers may connect to a store; None if they are not known.
    """

    node_info: NodeInfo
    timeout: float
    waited: float = 0.0
    addresses: tuple[str, ...] | None = None


class LeaveRequest(NamedTuple):
    """Take no part any more. With `wants_reply` it is answered by `LeaveReply`, whenever and however often it is
    said."""

    wants_reply: bool = False


class Heartbeat(NamedTuple):
    """I live. The coordinator sends the same back, in a large job to every second one: both sides know it of each
    other."""


class ProgressRequest(NamedTuple):
    """How far is the rendezvous? Answered by `Progress`."""


class ResumeRequest(NamedTuple):
    """What a node holds, said again when its link was lost and is open once more; a new coordinator is filled by it.

    `incarnation` names the coordinator that it was known to, `node` is the name that it went by there. `round` is the
    last round that it had a place in (-1 for none), `origin` the coordinator that has completed it, `round_over` says
    whether the node knows that this round has ended, `last_ended_round` is the newest round of which it knows that (-1
    for none), `failures` how many restarts it knows the job to have used. `control_rank` and `size`: see `Placement`.
    """

    incarnation: str
    node: NodeId
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


Request = JoinRequest | LeaveRequest | NodeOperation | Heartbeat | ProgressRequest | ResumeRequest | NodeAnswer


class Placement(NamedTuple):
    """A node's own place in a complete round, and all that its workers need to know.

    `restarts` is the number of restarts that the job has used so far, `max_restarts` how many it may use (-1 if nobody
    has said), `control_rank` the group rank of the node whose agent hosts the control plane, -1 if none does. `origin`
    is the incarnation of the coordinator that has completed the round; together with its number it names the round for
    good. `progress` is the highest step that workers of the job had reported before, -1 for none. `size` is how many
    nodes rounds have, where an operator has changed that. With `restart_workers` no worker of the round before goes on
    in its process, since on some node one cannot.
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
    """From where the workers of a round come: for the host of its store, before its place, in parts if they are many.

    `is_first_part` begins anew; `reason_unrestricted` says why they may come from elsewhere, empty if they do not.
    """

    addresses: tuple[str, ...]
    is_first_part: bool = True
    reason_unrestricted: str = ""


class RoundEnded(NamedTuple):
    """The round that you took part in is over; join again."""

    end: RoundEnd


class NodesWaiting(NamedTuple):
    """So many nodes wait to be taken in after `round`; `names` has a few of them."""

    round: int
    waiting: int
    names: tuple[str, ...] = ()


class Preempted(NamedTuple):
    """`node` will be taken away in `seconds`: `round` is to end in order before that.

    With `whole_job` the job ends then, since `node` was told so in the way that `why` says.
    """

    round: int
    node: str
    seconds: float
    whole_job: bool = False
    why: str = ""


class JobEnded(NamedTuple):
    """The job is over. `is_delegate`: this node is the one that does what one has to do for the job."""

    verdict: Verdict
    is_delegate: bool = False


class Refusal(StrEnum):
    """Why a join came to nothing."""

    CLOSED = "closed"
    TIMEOUT = "timeout"
    RANK_TAKEN = "rank taken"
    SPARE_NOT_NEEDED = "spare not needed"


class ConfigDifference(NamedTuple):
    """Something that a node was started with in another way than the job: what it is, and both values.

    `job_value_applies` says whether the job's value is the one that counts.
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
    """You, who are called `node`, were started in another way than the job; it is told to people on both sides."""

    node: str
    differences: tuple[ConfigDifference, ...]


class SessionEnded(NamedTuple):
    """The control plane ends this session, for the reason that `detail` says; the last thing that is said in it."""

    detail: str


class MissingNode(NamedTuple):
    """A node that left without another in its place: what it is called, why it went, and how many seconds ago."""

    name: str
    reason: Reason
    seconds_ago: float


class Progress(NamedTuple):
    """How far the rendezvous is, as facts; `progress_text` makes a sentence of them. Of names there are at most a
    few."""

    round: int
    complete: bool
    joined: int
    min_nodes: int
    max_nodes: int
    expected: tuple[str, ...]
    """Who is still to come, as far as that is known."""
    spare: bool
    backoff: float = 0.0
    """Seconds for which this round is held back: after failures without progress, or by a new control plane."""
    members: tuple[str, ...] = ()
    """Who is in."""
    removed: tuple[MissingNode, ...] = ()
    starts_in: float = -1.0
    """Seconds until the round starts with those who are in; negative if others have to come."""
    ends_in: float = -1.0
    """Seconds until the rendezvous comes to nothing; negative if it does not by the passing of time."""
    gave_up_by: str = ""
    """The node whose time is over, so that it has come to nothing."""
    waited: float = 0.0
    """For how many seconds that node has waited."""
    reports: bool = False
    """Whether this node is the one of those who wait that tells people about it."""


class JoinRefused(NamedTuple):
    """The join came to nothing; `detail` says why, or, where its time was over, `progress` how far things were."""

    refusal: Refusal
    detail: str
    progress: Progress | None = None


class ProgressText(NamedTuple):
    """How far the rendezvous is, in words; made on the node's own side, never sent.

    `warning`: this node is the one to tell people. `live` is the same in short for a line that is rewritten: what comes
    before the time that passes, and what comes after it.
    """

    text: str
    warning: bool
    live: tuple[str, str] = ("", "")


class LeaveReply(NamedTuple):
    """How the job stands without you, who have left it: whether it goes on, on how many nodes, and how it has ended."""

    goes_on: bool
    others: int
    outcome: Outcome | None = None


class LinkDown(NamedTuple):
    """The control plane is out of reach for now; made on the node's own side, never sent."""

    detail: str


class LinkOpened(NamedTuple):
    """The control plane was reached for the first time; made on the node's own side, never sent."""


class LinkUp(NamedTuple):
    """The control plane is in reach again; made on the node's own side, never sent.

    `join_lost`: the join that waited was said to a coordinator that is no more, which may have given it a place; it is
    not said again, and the node has to join anew.
    """

    join_lost: bool = False


class LinkLost(NamedTuple):
    """The control plane is out of reach for good; made on the node's own side, never sent.

    `error` is what a third party's handler or backend has raised, and what its user is to see.
    """

    detail: str
    error: BaseException | None = None


Notification = (
    Placed
    | StorePeers
    | RoundEnded
    | NodesWaiting
    | Preempted
    | JobEnded
    | JoinRefused
    | Progress
    | ProgressText
    | LeaveReply
    | ConfigDiffers
    | SessionEnded
    | Heartbeat
    | ReportRequested
    | CollectRequested
    | DrainRequested
    | OperatorAction
    | HangNotification
    | LinkDown
    | LinkOpened
    | LinkUp
    | LinkLost
)

Deliver = Callable[[Notification], None]
"""Called from any thread, with no lock held, in the order in which things happened. Must not block."""


class Link(Protocol):
    """One node's line to the control plane: it takes requests, and hands notifications to its `Deliver`.

    The node that hosts the coordinator has one without a socket (`local_link`), others one over TCP (`TcpLink`);
    shared-state backends have one that runs the core itself (`SharedStateLink`).
    """

    @property
    def address(self) -> str | None:
        """This node's address towards the control plane; None until that has been reached, which `LinkOpened` tells."""

    def send(self, request: Request) -> None:
        """Say something. Never blocks; a link that is lost says so by `LinkLost`."""

    def close(self) -> None:
        """End the session: the node is gone for the others. Idempotent; nothing is delivered afterwards."""
