"""Exchanges records between the agents of a round before its workers start, over the round's worker store.

A placement holds a node's own place only. Parts that need to know about other nodes (a framework's variables that name
every worker, a check that nodes reach each other) use this: each agent writes one small record, and reads the ones it
needs.

Laws:

1. Without users, nothing happens: no connection, no thread, no import of this file.
2. The agent's loop never waits: a thread of its own connects, writes and waits, and the loop is woken when it is done.
3. A round that ends meanwhile is dropped with its thread's connection. A node that dies meanwhile is handled by its
   lease. A store that cannot be reached, or a record that does not arrive, is a failure of this node.
4. What comes from the store is checked once, in `decode_record`.
5. Only the required records are read: reading all on each of n nodes costs n times n reads.
"""

from __future__ import annotations

import json
import math
import re
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rallypoint.agent.sources import Preparation
from rallypoint.base.clock import SYSTEM_CLOCK, Clock, Deadline
from rallypoint.base.endpoint import Endpoint, own_address, parse_endpoint
from rallypoint.base.errors import UserError
from rallypoint.base.log import get_logger, printable
from rallypoint.base.mailbox import Background
from rallypoint.rendezvous.elastic import ElasticHandler

if TYPE_CHECKING:
    from rallypoint.agent.spec import WorkerGroup
    from rallypoint.agent.workers import WorkerController
    from rallypoint.control.protocol.messages import Placement
    from rallypoint.store.api import Store

log = get_logger(__name__)

TIMEOUT = 60.0
"""Seconds within which the store must be reached and the records of the other nodes be written."""

_MAX_SENTENCE = 1000
_LATE = 5.0
"""Seconds after the deadline for which its thread may still be busy: with a name server, say."""
_WARN_AFTER = 10.0
"""Seconds until it is logged that the workers have to wait."""
_FEW = 8
"""The number of missing nodes that are named."""


class PeerUser(Protocol):
    """A user of other nodes' records. All methods are called on the loop's thread, and none blocks."""

    use: str
    """The name of its ports: lower-case letters, digits and hyphens."""

    def reserve(self, group: WorkerGroup) -> Sequence[int]:
        """Reserve ports of this node for the round that the group has entered, and release those of the last one.

        Raises:
            OSError: no ports are free.
        """

    def wanted(self, placement: Placement) -> Collection[int]:
        """The group ranks of the nodes whose records it needs."""

    def take(self, records: Mapping[int, PeerRecord]) -> None:
        """The records of all nodes that any user wants, by group rank; this node's own is always among them.

        Raises:
            ValueError: they do not fit; the text is a sentence.
        """

    def missed(self, why: str) -> bool:
        """The records do not arrive. Returns whether this user allows the workers to start without them."""

    def close(self) -> None:
        """The run is over: release the ports. Idempotent."""


def exchange_of(workers: WorkerController, nodes: int, why: str) -> PeerExchange:
    """The exchange of an agent that has not run yet, whose `users` can be extended; created on the first call.

    Args:
        workers: of the agent.
        nodes: the maximal number of nodes of the job. why: what needs it, for messages.

    Raises:
        UserError: the rounds have no store before their workers run.
    """
    handler = workers.group.spec.rdzv_handler
    if nodes > 1 and isinstance(handler, ElasticHandler) and not handler.use_agent_store:
        raise UserError(
            f"with {why} the nodes exchange their addresses over the worker store, which with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 exists only once workers run; unset that variable"
        )
    for each in workers.preparations:
        if isinstance(each, PeerExchange):
            return each
    made = PeerExchange()
    workers.add_preparation(made, first=True)
    return made


class PeerExchange(Preparation):
    """The exchange of one agent, round by round.

    Args:
        users: the users of the records; may grow until the first round.
        clock: the clock of the deadline.
        timeout: seconds for the exchange of one round.
    """

    def __init__(self, users: Sequence[PeerUser] = (), clock: Clock = SYSTEM_CLOCK, timeout: float = TIMEOUT) -> None:
        self.users = list(users)
        self._clock = clock
        self._timeout = timeout
        self._work: Background[_Attempt] = Background("rallypoint-peers")
        self._attempt: _Attempt | None = None
        self._warn_at = self._give_up_at = math.inf
        self.failure = self.failed_node = ""
        """A sentence on why the workers of this round cannot start; empty if nothing has failed."""

    def begin(self, group: WorkerGroup) -> None:
        """Begin the exchange of the round that the group has entered."""
        self.cancel()
        if not self.users:
            return
        placement = group.placement
        assert placement is not None
        try:
            ports = {each.use: tuple(each.reserve(group)) for each in self.users}
        except OSError as error:
            self._fail(f"{socket.gethostname()} has no port for its workers: {error.strerror or error}")
            return
        address = group.spec.local_addr or (placement.store_address if placement.group_rank == 0 else "")
        own = PeerRecord(
            placement.group_rank,
            socket.gethostname(),
            address,
            placement.ranks.base_rank,
            group.spec.local_world_size,
            {use: found for use, found in ports.items() if found},
        )
        wanted = {rank for each in self.users for rank in each.wanted(placement)} - {own.group_rank}
        if placement.group_world_size == 1:
            self._give_out({0: own})
            return
        limit = Deadline.after(self._timeout, self._clock)
        self._warn_at, self._give_up_at = self._clock.monotonic() + _WARN_AFTER, limit.at + _LATE
        self._attempt = _Attempt(placement, own, sorted(wanted), store_opener(group, placement), limit)
        self._work.start(self._attempt.run)

    def preparing(self) -> bool:
        """Whether the workers of the round have to wait for it."""
        return self._attempt is not None

    def fds(self) -> list[int]:
        return self._work.fds()

    def wake_at(self) -> float:
        """The time at which the wait is logged, or the thread counts as stuck, on the clock; infinite if it is idle."""
        return min(self._warn_at, self._give_up_at) if self._attempt is not None else math.inf

    def step(self) -> None:
        """Take the results of the thread."""
        done = self._work.take()
        if done is not None:
            self._end_attempt()
            if done.failure:
                self._fail(done.failure)
            else:
                self._give_out(done.records)
        now = self._clock.monotonic()
        if self._attempt is not None and now >= self._warn_at:
            self._warn_at = math.inf
            log.warning("%s", self._attempt.sentence(f"nothing has come for {_WARN_AFTER:g} s, of {self._timeout:g} s"))
        if self._attempt is not None and now >= self._give_up_at:
            why = self._attempt.sentence(f"nothing has come within {self._timeout:g} s")
            self._end_attempt()
            self._fail(why)

    def cancel(self) -> None:
        self.failure = ""
        self._end_attempt()

    def close(self) -> None:
        """Release everything. Idempotent."""
        self.cancel()
        self._work.close()
        for each in self.users:
            each.close()

    def _end_attempt(self) -> None:
        self._work.forget()
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.end()

    def _fail(self, why: str) -> None:
        can_start = [each.missed(why) for each in list(self.users)]  # each is told, and may be done
        self.failure = "" if all(can_start) else why

    def _give_out(self, records: Mapping[int, PeerRecord]) -> None:
        try:
            for each in list(self.users):
                each.take(records)
        except ValueError as error:
            self.failure = f"{socket.gethostname()} cannot start its workers: {error}"


class _Attempt:
    """The exchange of one round, on a separate thread."""

    def __init__(
        self,
        placement: Placement,
        own: PeerRecord,
        wanted: Sequence[int],
        open_store: OpenStore,
        limit: Deadline,
    ) -> None:
        self._placement = placement
        self._own = own
        self._wanted = wanted
        self._open_store = open_store
        self._limit = limit
        self._opened: OpenedStore | None = None
        self._lock = threading.Lock()
        self._ended = False
        self.records: dict[int, PeerRecord] = {}
        self.failure = ""

    def run(self) -> _Attempt:
        """Write and read; the returned object has the result in `records` or `failure`."""
        try:
            self._exchange()
        except Exception as error:  # a store may be a third party's, and raise anything
            self.failure = self.sentence(printable(f"{error}" or type(error).__name__, _MAX_SENTENCE))
        return self

    def end(self) -> None:
        """Drop the result: end the connection, also while the thread uses it. Idempotent."""
        with self._lock:
            self._ended = True
            opened, self._opened = self._opened, None
        close = getattr(opened.store, "close", None) if opened is not None and opened.is_own else None
        if close is not None:  # torch's stores have none
            close()

    def sentence(self, why: str) -> str:
        """A sentence on why the exchange has failed."""
        where = Endpoint(self._placement.store_address, self._placement.store_port)
        return (
            f"{self._own.node} cannot learn of the other nodes of round {self._placement.round} "
            f"over the worker store at {where}: {why}"
        )

    def _exchange(self) -> None:
        placement, own = self._placement, self._own
        if not own.address:
            own = own._replace(address=own_address(Endpoint(placement.store_address, placement.store_port)))
        opened = self._open_store(self._limit.remaining())
        with self._lock:
            ended, self._opened = self._ended, opened
        if ended:
            self.end()
            return
        store = opened.store
        self.records[own.group_rank] = own
        store.set(opened.key(own.group_rank), encode_record(own))
        if not self._wanted:
            return
        keys = [opened.key(rank) for rank in self._wanted]
        try:
            store.wait(keys, timedelta(seconds=max(0.001, self._limit.remaining())))
        except Exception as error:
            missing = [rank for rank, key in zip(self._wanted, keys, strict=True) if not store.check([key])]
            if not missing:
                raise
            more = f" and {len(missing) - _FEW} more" if len(missing) > _FEW else ""
            named = ", ".join(map(str, missing[:_FEW]))
            raise TimeoutError(
                f"nothing has come from group rank {named}{more} in time; see whether all nodes were started alike"
            ) from error
        for rank, data in zip(self._wanted, store.multi_get(keys), strict=True):
            self.records[rank] = decode_record(bytes(data), rank, placement.ranks.world_size)


FIRST_ROUNDS = ("0", "restart0")
"""The names that `round_scope` gives the first round of a job."""


def round_scope(group: WorkerGroup, placement: Placement) -> str:
    """A name of the round, the same for all its agents. Agents with a third party's handler may number rounds
    differently: what they have in common is the number of restarts, larger in each round.
    """
    if isinstance(group.spec.rdzv_handler, ElasticHandler):
        return str(placement.round)
    return f"restart{placement.restarts}"


class OpenedStore(NamedTuple):
    """A round's store; `is_own` says whether this connection is not shared."""

    store: Store
    scope: str
    is_own: bool

    def key(self, name: object) -> str:
        """A key of this round; that of a node's record has the group rank as its name."""
        return f"rallypoint/peers/{self.scope}/{name}"


OpenStore = Callable[[float], OpenedStore]
"""Opens the store of a round, with a timeout in seconds."""


def store_opener(group: WorkerGroup, placement: Placement) -> OpenStore:
    """A store of ours is new in each round. One from a third party's handler may serve all rounds."""
    scope = round_scope(group, placement)

    def own(timeout: float) -> OpenedStore:
        from rallypoint.store.client import TCPStore

        store = TCPStore(placement.store_address, placement.store_port, timeout=timeout)
        return OpenedStore(store, scope, True)

    def given(_timeout: float) -> OpenedStore:
        store = group.store
        assert store is not None
        clone = getattr(store, "clone", None)  # a wait in a connection blocks all other users of it
        return OpenedStore(store if clone is None else clone(), scope, clone is not None)

    return own if isinstance(group.spec.rdzv_handler, ElasticHandler) else given


# The record


_MAX_RECORD = 64 * 1024
_MAX_NAME = 255
_MAX_USES = 16
_USE = re.compile(r"[a-z][a-z0-9-]{0,31}")


class PeerRecord(NamedTuple):
    """The record that a node shares with the others.

    `address` is the address at which others reach it, `ports` are those that it has reserved there for this round, by
    use. `base_rank` and `local_world_size` say which global ranks are there.
    """

    group_rank: int
    node: str
    address: str
    base_rank: int
    local_world_size: int
    ports: Mapping[str, tuple[int, ...]] = {}


def encode_record(record: PeerRecord) -> bytes:
    """The stored form of a record."""
    return json.dumps([*record[:-1], dict(record.ports)]).encode()


def decode_record(data: bytes, group_rank: int, world_size: int) -> PeerRecord:
    """The record that another node has written.

    Args:
        data: the value.
        group_rank: the group rank of the node under whose key it was.
        world_size: the number of workers of the round.

    Raises:
        ValueError: it is not a record, or has invalid values; the text is a sentence.
    """
    try:
        if len(data) > _MAX_RECORD:
            raise ValueError(f"it has {len(data)} bytes")
        rank, node, address, base_rank, local_world_size, ports = json.loads(data)
        first = _number(base_rank, 0, world_size - 1, "base rank")
        return PeerRecord(
            _number(rank, group_rank, group_rank, "group rank"),
            _node(node),
            _address(address),
            first,
            _number(local_world_size, 1, world_size - first, "number of workers"),
            _ports(ports),
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"the record of group rank {group_rank} cannot be used ({printable(str(error))}); "
            "see whether all nodes run the same version, and whether something else writes to the store"
        ) from None


def _node(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME or not value.isprintable():
        raise ValueError(f"it has the node name {value!r}")
    return value


def _address(value: object) -> str:
    """A host name or numeric address."""
    if not isinstance(value, str) or len(value) > _MAX_NAME or not value:
        raise ValueError(f"it has the address {value!r}")
    try:
        if ":" in value:
            socket.inet_pton(socket.AF_INET6, value)
        elif parse_endpoint(value, 1).host != value:
            raise ValueError
    except (OSError, ValueError, UserError):
        raise ValueError(f"it has the address {value!r}") from None
    return value


def _ports(value: object) -> Mapping[str, tuple[int, ...]]:
    if not isinstance(value, dict) or len(value) > _MAX_USES:
        raise ValueError("it has no ports by use")
    found = {}
    for use, ports in value.items():
        if not _USE.fullmatch(use) or not isinstance(ports, list):
            raise ValueError(f"it has ports for {use!r}")
        found[use] = tuple(_number(port, 1, 65535, "port") for port in ports)
    return found


def _number(value: object, least: int, most: int, what: str) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"it has the {what} {value!r}, where {least} to {most} can be")
    return value
