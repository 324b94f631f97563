"""What a node and the arbiter say to each other. Plain data; `codec` puts it on the wire.

A node sends requests, and is sent notices. One join costs one request and one notice, whatever the number of nodes:
a notice holds the node's own place and never the roll.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from rallypoint.ranks.assign import NodeRanks
from rallypoint.rendezvous.operations import Close, Drain, Fail, Succeed
from rallypoint.rendezvous.state import Member, RoundEnd, Verdict


class JoinRequest(NamedTuple):
    """Take part; give up after `timeout` seconds. An empty `member.address` stands for the session's own."""

    member: Member
    timeout: float


class Leave(NamedTuple):
    """Take no part any more."""


class Beat(NamedTuple):
    """I live. The arbiter sends the same back, so that both sides know it of each other."""


class Inquire(NamedTuple):
    """How far is the rendezvous? Answered by `Progress`."""


Request = JoinRequest | Leave | Fail | Succeed | Drain | Close | Beat | Inquire


class Placement(NamedTuple):
    """A node's own place in a complete round, and all that its workers need to know.

    `restarts` is the number of restarts that the job has used so far.
    """

    round: int
    group_rank: int
    group_world_size: int
    ranks: NodeRanks
    store_address: str
    store_port: int
    restarts: int


class Placed(NamedTuple):
    """The round is complete and this is your place in it."""

    placement: Placement


class RoundEnded(NamedTuple):
    """The round that you took part in is over; join again."""

    end: RoundEnd


class NodesWaiting(NamedTuple):
    """So many nodes wait to be taken in after `round`."""

    round: int
    waiting: int


class JobEnded(NamedTuple):
    """The job is over."""

    verdict: Verdict


class Refusal(StrEnum):
    """Why a join came to nothing."""

    CLOSED = "closed"
    TIMEOUT = "timeout"
    RANK_TAKEN = "rank taken"
    SPARE_NOT_NEEDED = "spare not needed"


class JoinRefused(NamedTuple):
    """The join came to nothing; `detail` says how far the rendezvous was."""

    refusal: Refusal
    detail: str


class Progress(NamedTuple):
    """How far the rendezvous is, as one sentence's worth of facts. `awaited` names at most a few."""

    round: int
    complete: bool
    joined: int
    min_nodes: int
    max_nodes: int
    awaited: tuple[str, ...]
    spare: bool

    def __str__(self) -> str:
        if self.spare:
            return f"all {self.max_nodes} seats of round {self.round} are taken; this node waits as a spare"
        if self.complete:
            return f"round {self.round} runs with {self.joined} nodes; this node waits for the next round"
        bounds = f"{self.min_nodes}" if self.min_nodes == self.max_nodes else f"{self.min_nodes} to {self.max_nodes}"
        missing = f"; missing: {', '.join(self.awaited)}" if self.awaited else ""
        return f"{self.joined} of {bounds} nodes are in{missing}"


class LinkLost(NamedTuple):
    """The control plane is out of reach; made on the node's own side, never sent."""

    detail: str


Notice = Placed | RoundEnded | NodesWaiting | JobEnded | JoinRefused | Progress | Beat | LinkLost
