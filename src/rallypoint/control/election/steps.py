"""Events of a candidate, and its effects: plain data. Pure.

A *request* can take time, and is answered (`Ask`, `Answered`, `Failed`); the machine has at most one in progress. All
other *effects* run at once, in order, without an answer.
"""

from __future__ import annotations

from collections.abc import Generator
from enum import Enum, auto
from typing import NamedTuple, TypeAlias, TypeVar

from rallypoint.control.etcd.api import Compare, KeyValue, Operation, TxnResult, WatchEnd, WatchEvent
from rallypoint.control.membership.state import State

T = TypeVar("T")

DEBUG, INFO, WARNING = 10, 20, 30
"""Levels of log lines, as in `logging`."""


class Fence(tuple[bytes, int]):
    """Our own key, and the revision at which it was created."""

    def comparison(self) -> Compare:
        """The condition that we are still the elected candidate."""
        key, created = self
        return Compare(key, "create_revision", "==", created)


class CandidatePhase(Enum):
    """The phase of a candidate; see `machine`."""

    RESTING = auto()
    ASKING = auto()
    STANDBY = auto()
    WAITING = auto()
    LEADING = auto()
    ENDING = auto()
    GONE = auto()


class Chore(Enum):
    """Duties besides the goal, performed in this order when due."""

    KEEP_LEASE = auto()
    """Keep our lease alive."""
    KEEP_STATE = auto()
    """Keep the state's lease alive."""
    FIND_LEADER = auto()
    """Read the coordinator's place, and continue to watch it."""
    FIND_NODES = auto()
    """Read the candidates, and continue to watch them."""
    DEPOSE = auto()
    """End the lease of a coordinator whose port refuses connections (law 4)."""


class Watched(Enum):
    """The kinds of watches: at most one of each."""

    LEADER = auto()
    """The key with the coordinator's address."""
    NODES = auto()
    """The keys of all candidates, watched by each of them."""


# Requests


class Txn(NamedTuple):
    """One transaction, which can be sent again if its answer is lost; answered with a `TxnResult`."""

    compares: tuple[Compare, ...]
    then: tuple[Operation, ...]
    otherwise: tuple[Operation, ...] = ()


class Grant(NamedTuple):
    """Grant a lease of this many seconds; answered with its id."""

    ttl_s: int


class RenewLease(NamedTuple):
    """Renew a lease; answered with its seconds, 0 if it is gone."""

    lease: int


class Revoke(NamedTuple):
    """End a lease and delete its keys; answered with None."""

    lease: int


class FindAddresses(NamedTuple):
    """Look up this machine's addresses; answered with `Addresses`."""


class Takeover(NamedTuple):
    """The initial state of a term, and its version in etcd.

    `incarnation`: the coordinator's name to use, "" for a new one. `number`, `revision` and `lease` belong to the state
    in etcd, 0 for none. `forgets`: that state came from an earlier launch.
    """

    incarnation: str
    state: State
    number: int
    revision: int
    lease: int
    forgets: bool = False


class StartTerm(NamedTuple):
    """Coordinate the job, starting from the takeover; answered with `Listening`. The number identifies the term."""

    number: int
    fence: Fence
    addresses: tuple[str, ...]
    takeover: Takeover


class EndTerm(NamedTuple):
    """Stop coordinating; nodes get this many seconds to read the last notifications. Answered with None."""

    linger_s: float


Request: TypeAlias = Txn | Grant | RenewLease | Revoke | FindAddresses | StartTerm | EndTerm


class Addresses(NamedTuple):
    """Addresses at which others can reach this machine, the likeliest first."""

    found: tuple[str, ...]


class Listening(NamedTuple):
    """Address of a term's server, and its nodes' secret."""

    addresses: tuple[str, ...]
    port: int
    secret: str


Answer: TypeAlias = TxnResult | Listening | Addresses | int | None
Procedure: TypeAlias = Generator[Request, Answer, T]
"""A sequence of requests: each is yielded; its answer is sent back, or its error thrown in."""

# Effects


class Ask(NamedTuple):
    """Perform a request, and step with its result and this number.

    etcd has `timeout_s` seconds to answer; None uses the client's default.
    """

    number: int
    request: Request
    timeout_s: float | None


class WatchKeys(NamedTuple):
    """Watch a key, or with `prefix` all keys that begin with it, from a revision on; `number` identifies the watch."""

    kind: Watched
    number: int
    key: bytes
    revision: int
    prefix: bool


class EndWatch(NamedTuple):
    """End the watch of that kind."""

    kind: Watched


class Publish(NamedTuple):
    """Pass the value of the leader's key to the link."""

    kvs: tuple[KeyValue, ...]
    revision: int


class ResetRevision(NamedTuple):
    """Tell the link that its revisions are from an etcd that no longer exists."""


class PermanentError(NamedTuple):
    """Tell the link why no coordinator will be found until a user changes something; "" withdraws this."""

    sentence: str


class EtcdTrouble(NamedTuple):
    """Tell the link why etcd is currently unavailable; "" withdraws this."""

    sentence: str


class NodesLost(NamedTuple):
    """Tell the term that the nodes with these numbers are lost, with the evidence."""

    nodes: frozenset[int]
    detail: str


class WriteLog(NamedTuple):
    """Log a line; with an error, also its traceback."""

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
    """This agent must leave etcd."""


class Answered(NamedTuple):
    """The request of that number succeeded."""

    number: int
    answer: Answer


class Failed(NamedTuple):
    """The request of that number failed."""

    number: int
    error: Exception


class Broken(NamedTuple):
    """A step or an effect failed unexpectedly."""

    error: Exception


class LinkNews(NamedTuple):
    """What the link knows: the coordinator of the last session, the lease of one whose port refuses connections, and
    whether the last attempt failed."""

    met: str = ""
    refused: int = 0
    lost: bool = False


class Changed(NamedTuple):
    """A watch reports changes."""

    watch: int
    events: tuple[WatchEvent, ...]


class Unwatched(NamedTuple):
    """A watch ended on its own."""

    watch: int
    lost: WatchEnd


class Deposed(NamedTuple):
    """That term's journal can no longer write."""

    term: int
    why: str


Event: TypeAlias = Tick | LeaveElection | Answered | Failed | Broken | LinkNews | Changed | Unwatched | Deposed

# Requests as steps of a procedure


def transact(
    compares: tuple[Compare, ...], then: tuple[Operation, ...], otherwise: tuple[Operation, ...] = ()
) -> Procedure[TxnResult]:
    """Make a transaction."""
    result = yield Txn(compares, then, otherwise)
    assert isinstance(result, TxnResult)
    return result


def number_of(request: Grant | RenewLease) -> Procedure[int]:
    """Make a request that is answered with a number."""
    number = yield request
    assert isinstance(number, int)
    return number
