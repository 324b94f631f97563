"""What happens to a candidate, and what it has done about that: plain data. Pure.

A *request* may take its time, and is answered (`Ask`, `Answered`, `Failed`); the machine has one under way at
most. All other *effects* are done at once, in order, and not answered.
"""

from __future__ import annotations

from collections.abc import Generator
from enum import Enum, auto
from typing import NamedTuple, TypeAlias, TypeVar

from rallypoint.election.takeover import Takeover
from rallypoint.etcd.api import Compare, KeyValue, Operation, TxnResult, WatchEnd, WatchEvent
from rallypoint.membership.state import NodeId

T = TypeVar("T")

DEBUG, INFO, WARNING = 10, 20, 30
"""Levels of lines of the log, as `logging` has them."""


class Fence(tuple[bytes, int]):
    """Our own key, and the revision that it was created with."""

    def comparison(self) -> Compare:
        """That we are still who we were when we were elected."""
        key, created = self
        return Compare(key, "create_revision", "==", created)


class CandidatePhase(Enum):
    """Where a candidate stands; see `machine`."""

    RESTING = auto()
    ASKING = auto()
    WAITING = auto()
    LEADING = auto()
    ENDING = auto()
    GONE = auto()


class Chore(Enum):
    """What is done beside the goal when its time has come, in this order."""

    KEEP_LEASE = auto()
    """Keep our lease alive."""
    KEEP_STATE = auto()
    """Keep the lease alive that the state hangs on."""
    RENAME = auto()
    """Write the name by which the coordinator greeted this node."""
    FIND_LEADER = auto()
    """Read where the coordinator is, and watch on."""
    FIND_NODES = auto()
    """Read which nodes have a key, and watch on."""
    DEPOSE = auto()
    """End the lease of a coordinator whose port refuses (law 4)."""


class Watched(Enum):
    """What is watched: one watch of each kind at most."""

    LEADER = auto()
    """The key that says where the coordinator is."""
    PREDECESSOR = auto()
    """The key of the next older candidate."""
    NODES = auto()
    """The keys of all candidates, by whoever coordinates."""


# Requests


class Txn(NamedTuple):
    """One transaction, which may be sent again when its answer was lost; answered with a `TxnResult`."""

    compares: tuple[Compare, ...]
    then: tuple[Operation, ...]
    otherwise: tuple[Operation, ...] = ()
    timeout_s: float | None = None


class Grant(NamedTuple):
    """Grant a lease of so many seconds; answered with its id."""

    ttl_s: int


class KeepLeaseAlive(NamedTuple):
    """Begin a lease's time anew; answered with its seconds, 0 if it is gone."""

    lease: int
    timeout_s: float | None = None


class Revoke(NamedTuple):
    """End a lease and all that hangs on it; answered with None."""

    lease: int
    timeout_s: float | None = None


class FindAddresses(NamedTuple):
    """Look up this machine's addresses; answered with `Addresses`."""


class StartTerm(NamedTuple):
    """Coordinate the job from what was taken over; answered with `Listening`. The number identifies the term."""

    number: int
    fence: Fence
    addresses: tuple[str, ...]
    takeover: Takeover


class EndTerm(NamedTuple):
    """Coordinate no more; nodes have so many seconds to read the last notifications. Answered with None."""

    linger_s: float


Request: TypeAlias = Txn | Grant | KeepLeaseAlive | Revoke | FindAddresses | StartTerm | EndTerm


class Addresses(NamedTuple):
    """Those of this machine as others may reach it, the likeliest first."""

    found: tuple[str, ...]


class Listening(NamedTuple):
    """Where a term's server listens, and the secret that its nodes prove."""

    addresses: tuple[str, ...]
    port: int
    secret: str


Answer: TypeAlias = TxnResult | Listening | Addresses | int | None
Procedure: TypeAlias = Generator[Request, Answer, T]
"""Requests in a row: each is yielded, its answer is sent back or its error thrown in."""

# Effects


class Ask(NamedTuple):
    """Do a request, and step with what comes of it and this number."""

    number: int
    request: Request


class WatchKeys(NamedTuple):
    """Watch a key, or with `prefix` all that begin with it, from a revision on; `number` identifies the watch."""

    kind: Watched
    number: int
    key: bytes
    revision: int
    prefix: bool


class EndWatch(NamedTuple):
    """End the watch of that kind."""

    kind: Watched


class Publish(NamedTuple):
    """The link gets what stands under the leader's key."""

    kvs: tuple[KeyValue, ...]
    revision: int


class ResetRevision(NamedTuple):
    """What the link knows is of an etcd that is no more: its revisions count for nothing."""


class PermanentError(NamedTuple):
    """The link gets why no coordinator will be found until somebody changes something; "" takes it back."""

    sentence: str


class EtcdTrouble(NamedTuple):
    """The link gets why etcd cannot be asked just now; "" takes it back."""

    sentence: str


class NodesLost(NamedTuple):
    """The term gets that these nodes are lost, and how that is known."""

    nodes: frozenset[NodeId]
    detail: str


class WriteLog(NamedTuple):
    """A line of the log; with an error, its traceback too."""

    level: int
    text: str
    args: tuple[object, ...] = ()
    error: Exception | None = None


Effect: TypeAlias = (
    Ask | WatchKeys | EndWatch | Publish | ResetRevision | PermanentError | EtcdTrouble | NodesLost | WriteLog
)

# Events


class Tick(NamedTuple):
    """Time has passed."""


class LeaveElection(NamedTuple):
    """This agent is to leave etcd."""


class Answered(NamedTuple):
    """The request of that number is done."""

    number: int
    answer: Answer


class Failed(NamedTuple):
    """The request of that number could not be done."""

    number: int
    error: Exception


class Broken(NamedTuple):
    """A step, or an effect, has gone wrong in a way that nobody has foreseen."""

    error: Exception


class LinkState(NamedTuple):
    """What the link knows: this node's name, the coordinator it met last, and the lease of one whose port refuses."""

    name: NodeId | None
    met: str
    refused: int


class Changed(NamedTuple):
    """A watch reports changes."""

    watch: int
    events: tuple[WatchEvent, ...]


class Unwatched(NamedTuple):
    """A watch has ended by itself."""

    watch: int
    lost: WatchEnd


class Deposed(NamedTuple):
    """The journal of that term can write no more."""

    term: int
    why: str


Event: TypeAlias = Tick | LeaveElection | Answered | Failed | Broken | LinkState | Changed | Unwatched | Deposed

# Requests as steps of a procedure


def transact(
    compares: tuple[Compare, ...],
    then: tuple[Operation, ...],
    otherwise: tuple[Operation, ...] = (),
    timeout_s: float | None = None,
) -> Procedure[TxnResult]:
    """Make a transaction."""
    result = yield Txn(compares, then, otherwise, timeout_s)
    assert isinstance(result, TxnResult)
    return result


def number_of(request: Grant | KeepLeaseAlive) -> Procedure[int]:
    """Make a request that is answered with a number."""
    number = yield request
    assert isinstance(number, int)
    return number
