"""The setup of a round for features before its workers start: this node's interface, and the exchange between nodes.

A separate thread runs the steps of a round in order. Then the loop takes the results:

    InterfaceChoice   the network interface for gloo and NCCL (`socket_ifname`), with `--socket-ifname=auto`
    PeerExchange      records of other nodes, over the round's worker store, for its users: a framework's variables
                      that name every worker (`worker_env`), and the mesh of `--preflight`
    MeshDialer        this node dials others (`preflight/mesh`)

A placement describes only a node's own place, so each agent writes one small record, and reads those that it needs.

Laws:

1. Without steps, nothing happens: no connection, no thread.
2. The agent's loop never waits: the thread connects, dials and waits, and wakes the loop when it is done.
3. A round that ends meanwhile is dropped, and the thread's connection with it. The lease detects nodes that die
   meanwhile. An unreachable store or a missing record is a failure of this node.
4. Data from the store is checked once, in `decode_record`.
5. A node reads only the records that it needs: if each of n nodes read all, that would be n times n reads.
"""

from __future__ import annotations

import json
import math
import re
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
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
"""Seconds to reach the store, and for the other nodes to write their records."""
_LATE = 5.0
"""Seconds that the thread may still be busy after a deadline, for example with a name server."""
_WARN_AFTER = 10.0
"""Seconds until a log line says that the workers are waiting for records."""
_MAX_SENTENCE = 1000
_FEW = 8
"""Maximum number of missing nodes to name."""
FIRST_ROUNDS = ("0", "restart0")
"""The names that `round_scope` uses for a job's first round."""


class Unprepared(Exception):
    """The workers of a round cannot start.

    Args:
        why: the reason, as a sentence.
        node: the name of the node that failed; empty for this one.
        ends_job: whether this ends the job, even if restarts are left.
    """

    def __init__(self, why: str, node: str = "", *, ends_job: bool = False) -> None:
        super().__init__(why)
        self.node = node
        self.ends_job = ends_job


class RoundInSetup:
    """One round, for the thread that prepares it. `cancel` ends any wait of the thread."""

    def __init__(self, group: WorkerGroup, clock: Clock) -> None:
        assert group.placement is not None
        self.group = group
        self.place: Placement = group.placement
        self.scope = round_scope(group, self.place)
        self.store_endpoint = Endpoint(self.place.store_address, self.place.store_port)
        self.clock = clock
        self.over = threading.Event()
        """Set when the round ends or its steps are complete."""
        self.step: SetupStep | None = None
        """The thread's current step."""
        self.seconds = math.inf
        self.deadline = Deadline.after(math.inf, clock)
        self.failure: Unprepared | None = None
        self.records: Mapping[int, PeerRecord] = {}
        """The records from the exchange, by group rank, including this node's own."""
        self.own: PeerRecord | None = None
        """This node's record, if nodes exchange records."""
        self._lock = threading.Lock()
        self._close: list[Callable[[], None]] = []

    def limit(self, seconds: float) -> None:
        """Allow the thread this many more seconds."""
        self.seconds = seconds
        self.deadline = Deadline.after(seconds, self.clock)

    def at_end(self, close: Callable[[], None]) -> None:
        """Call `close` when the round ends, or immediately if it has ended."""
        with self._lock:
            if not self.over.is_set():
                self._close.append(close)
                return
        close()

    def end(self) -> None:
        """Release everything, even if the thread is still using it. Idempotent."""
        with self._lock:
            self.over.set()
            closing, self._close = self._close, []
        for close in closing:
            close()

    @cached_property
    def store(self) -> Store:
        """The round's store, opened on first use; only for the round's thread. Our stores are new in each round; a
        third-party handler may use one store for all rounds.
        """
        seconds = self.deadline.remaining()
        if isinstance(self.group.spec.rdzv_handler, ElasticHandler):
            from rallypoint.store.client import TCPStore

            own = TCPStore(*self.store_endpoint, timeout=seconds)
            self.at_end(own.close)
            return own
        store = self.group.store
        assert store is not None
        clone = getattr(store, "clone", None)  # a wait on a connection blocks all its other users
        if clone is None:
            return store
        cloned: Store = clone()
        self.at_end(getattr(cloned, "close", lambda: None))  # torch's stores have no `close`
        return cloned

    def key(self, name: object) -> str:
        """A key for this round; the name of a node's record is the group rank."""
        return f"rallypoint/peers/{self.scope}/{name}"

    def wait(self, keys: list[str]) -> None:
        """Wait for these keys in the store until the deadline."""
        self.store.wait(keys, timedelta(seconds=max(0.001, self.deadline.remaining())))


class SetupStep(Protocol):
    """One step of a round's setup. `run` and its callees run on the round's thread, other methods on the loop's. All
    but `sentence` and `close` raise Unprepared if the workers cannot start.
    """

    def begin(self, round_: RoundInSetup) -> bool:
        """Reserve the resources for the round. Returns whether `run` has work."""
        return True

    def run(self, round_: RoundInSetup) -> None:
        """Do the slow part of the step."""

    def missed(self, round_: RoundInSetup, why: str) -> None:
        """Handle a result that is late, for this reason."""

    def sentence(self, round_: RoundInSetup, why: str) -> str:
        """Say in a sentence that the result is missing."""

    def take(self, round_: RoundInSetup) -> None:
        """Take the result."""

    def close(self) -> None:
        """Release everything when the run ends. Idempotent."""


class RoundSetup(Preparation):
    """The steps of one agent. Each round waits for them.

    Args:
        steps: in the order in which they run.
        clock: the clock for the deadlines.
    """

    def __init__(self, steps: Sequence[SetupStep] = (), clock: Clock = SYSTEM_CLOCK) -> None:
        self.steps = list(steps)
        self.failure = self.failed_node = ""
        self.ends_job = False
        self._clock = clock
        self._work: Background[RoundInSetup] = Background("rallypoint-setup")
        self._round: RoundInSetup | None = None
        self._look_at = math.inf
        self._warned = False

    @classmethod
    def of(cls, workers: WorkerController) -> RoundSetup:
        """The setup of an agent that is not running yet; created on the first call."""
        for preparation in workers.preparations:
            if isinstance(preparation, cls):
                return preparation
        made = cls()
        workers.add_preparation(made)
        return made

    def begin(self, group: WorkerGroup) -> None:
        self.cancel()
        round_ = RoundInSetup(group, self._clock)
        try:
            due = [step for step in self.steps if step.begin(round_)]
            if not due:
                for step in self.steps:
                    step.take(round_)
                return
        except Unprepared as failure:
            round_.end()
            self._fail(failure)
            return
        self._round = round_
        self._look_at, self._warned = self._clock.monotonic() + _WARN_AFTER, False
        if not self._work.start(lambda: _run(round_, due)):
            self.cancel()
            self._fail(Unprepared(NO_THREAD))

    def preparing(self) -> bool:
        return self._round is not None

    def fds(self) -> list[int]:
        return self._work.fds()

    def wake_at(self) -> float:
        return math.inf if self._round is None else min(self._look_at, self._round.deadline.at + _LATE)

    def step(self) -> None:
        if (done := self._work.take_result()) is not None:
            self._end(done)
        round_, now = self._round, self._clock.monotonic()
        if round_ is None or round_.step is None:
            return
        if now >= self._look_at:
            self._look_at = now + _WARN_AFTER  # the thread might have a new deadline
            if not self._warned and not round_.records:
                self._warned = True
                log.warning(
                    "%s",
                    round_.step.sentence(
                        round_, f"nothing has arrived for {_WARN_AFTER:g} s (limit: {round_.seconds:g} s)"
                    ),
                )
        if now >= round_.deadline.at + _LATE:
            try:
                round_.step.missed(round_, round_.step.sentence(round_, f"nothing arrived within {round_.seconds:g} s"))
            except Unprepared as failure:
                round_.failure = failure
            self._end(round_)

    def cancel(self) -> None:
        self.failure = self.failed_node = ""
        self._work.forget()
        round_, self._round = self._round, None
        if round_ is not None:
            round_.end()

    def close(self) -> None:
        self.cancel()
        self._work.close()
        for step in self.steps:
            step.close()

    def _end(self, round_: RoundInSetup) -> None:
        self.cancel()
        try:
            if round_.failure is not None:
                raise round_.failure
            for step in self.steps:
                step.take(round_)
        except Unprepared as failure:
            self._fail(failure)

    def _fail(self, failure: Unprepared) -> None:
        self.failure, self.failed_node, self.ends_job = str(failure), failure.node, failure.ends_job


NO_THREAD = "this machine does not allow any more threads; raise the limit of processes (`ulimit -u`, pids.max)"


def _run(round_: RoundInSetup, due: Sequence[SetupStep]) -> RoundInSetup:
    """Run the due steps, on the round's thread."""
    try:
        for step in due:
            round_.step = step
            step.run(round_)
    except Unprepared as failure:
        round_.failure = failure
    except Exception as error:  # or the loop would wait for this thread until the deadline
        log.exception("the workers cannot be prepared; this is a bug in Rallypoint (please report it)")
        round_.failure = Unprepared(f"the workers cannot be prepared: {error!r}")
    finally:
        round_.end()
    return round_


def missed_by(step: SetupStep, round_: RoundInSetup, error: Exception) -> None:
    """Handle an error, of any kind, that ended a step's `run`."""
    if not round_.over.is_set():
        step.missed(round_, step.sentence(round_, printable(f"{error}" or type(error).__name__, _MAX_SENTENCE)))


def round_scope(group: WorkerGroup, placement: Placement) -> str:
    """A name for the round that all its agents share. With a third-party handler, agents may number rounds
    differently, but agree on the number of restarts, which grows with each round.
    """
    if isinstance(group.spec.rdzv_handler, ElasticHandler):
        return str(placement.round)
    return f"restart{placement.restarts}"


# The exchange


class PeerUser(Protocol):
    """A user of other nodes' records. Its methods run on the loop's thread, or on the round's while the loop waits."""

    use: str
    """Name for its ports: lower-case letters, digits and hyphens."""

    def takes_part(self, round_: RoundInSetup) -> bool:
        """Whether it needs records in this round. If not, no other method is called."""
        return True

    def reserve(self, round_: RoundInSetup) -> Sequence[int]:
        """Reserve ports on this node for the round, and release those for the last round. Raises OSError."""

    def wanted(self, round_: RoundInSetup) -> Collection[int]:
        """The group ranks whose records it needs."""

    def missed(self, round_: RoundInSetup, why: str) -> None:
        """Handle missing records. Raises Unprepared if the workers need them."""
        raise Unprepared(why)

    def take(self, round_: RoundInSetup) -> None:
        """Take all wanted records, and this node's own, from the round.

        Raises:
            ValueError: the records do not fit; the text is a sentence.
        """

    def close(self) -> None:
        """Release the ports when the run ends. Idempotent."""


def exchange_of(workers: WorkerController, nodes: int, why: str) -> PeerExchange:
    """The exchange of an agent that is not running yet, with extensible `users`; created on the first call.

    Args:
        workers: the agent's workers.
        nodes: the job's maximum number of nodes.
        why: the reason for the exchange, for messages.

    Raises:
        UserError: the rounds have no store before their workers run.
        UserError: the rounds have no store before their workers run.
    """
    handler = workers.group.spec.rdzv_handler
    if nodes > 1 and isinstance(handler, ElasticHandler) and not handler.use_agent_store:
        raise UserError(
            f"with {why}, the nodes exchange their addresses over the worker store, but with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 the store exists only while workers run; unset that variable"
        )
    steps = RoundSetup.of(workers).steps
    found = next((step for step in steps if isinstance(step, PeerExchange)), None)
    if found is None:
        found = PeerExchange()
        steps.append(found)
    return found


class PeerExchange(SetupStep):
    """The exchange of one agent.

    Args:
        users: the users of the records; the list can grow until the first round.
        timeout: seconds for the exchange in one round.
    """

    def __init__(self, users: Sequence[PeerUser] = (), timeout: float = TIMEOUT) -> None:
        self.users = list(users)
        self._timeout = timeout

    def _users_in(self, round_: RoundInSetup) -> list[PeerUser]:
        return [user for user in self.users if user.takes_part(round_)]

    def begin(self, round_: RoundInSetup) -> bool:
        place, group, users = round_.place, round_.group, self._users_in(round_)
        if not users:
            return False
        address = stated_address(round_)
        try:
            ports = {user.use: tuple(user.reserve(round_)) for user in users}
        except OSError as error:
            self.missed(round_, f"{socket.gethostname()} found no port for its workers: {error.strerror or error}")
            return False
        round_.own = PeerRecord(
            *(place.group_rank, socket.gethostname(), address, place.ranks.base_rank, group.spec.local_world_size),
            {use: found for use, found in ports.items() if found},
        )
        if place.group_world_size == 1:
            round_.records = {0: round_.own}
        return place.group_world_size > 1

    def run(self, round_: RoundInSetup) -> None:
        round_.limit(self._timeout)
        try:
            round_.records = self._exchange(round_)
        except Exception as error:
            missed_by(self, round_, error)

    def missed(self, round_: RoundInSetup, why: str) -> None:
        for user in self._users_in(round_):
            user.missed(round_, why)

    def sentence(self, round_: RoundInSetup, why: str) -> str:
        host, number = socket.gethostname(), round_.place.round
        store = round_.store_endpoint
        return f"{host} cannot learn about the other nodes of round {number} from the worker store at {store}: {why}"

    def take(self, round_: RoundInSetup) -> None:
        try:
            for user in self._users_in(round_) if round_.records else ():
                user.take(round_)
        except ValueError as error:
            raise Unprepared(f"{socket.gethostname()} cannot start its workers: {error}") from None

    def close(self) -> None:
        for user in self.users:
            user.close()

    def _exchange(self, round_: RoundInSetup) -> Mapping[int, PeerRecord]:
        place, own, store = round_.place, round_.own, round_.store
        assert own is not None
        if not own.address:
            own = own._replace(address=own_address(round_.store_endpoint))
        store.set(round_.key(own.group_rank), encode_record(own))
        wanted = {rank for user in self._users_in(round_) for rank in user.wanted(round_)}
        keys = {rank: round_.key(rank) for rank in sorted(wanted - {own.group_rank})}
        if not keys:
            return {own.group_rank: own}
        try:
            round_.wait(list(keys.values()))
        except Exception as error:
            missing = [rank for rank, key in keys.items() if not store.check([key])]
            if not missing:
                raise
            more = f" and {len(missing) - _FEW} more" if len(missing) > _FEW else ""
            named = ", ".join(map(str, missing[:_FEW]))
            raise TimeoutError(
                f"nothing arrived from group rank {named}{more} in time; check that all nodes were started with the "
                "same flags"
            ) from error
        values = zip(keys, store.multi_get(list(keys.values())), strict=True)
        found = {rank: decode_record(bytes(data), rank, place.ranks.world_size) for rank, data in values}
        return {own.group_rank: own, **found}


def stated_address(round_: RoundInSetup) -> str:
    """The address at which others reach this node, from its own flag or the store's place; empty if unknown."""
    place = round_.place
    return round_.group.spec.local_addr or (place.store_address if place.group_rank == 0 else "")


# Record


_MAX_RECORD = 64 * 1024
_MAX_NAME = 255
_MAX_USES = 16
_USE = re.compile(r"[a-z][a-z0-9-]{0,31}")


class PeerRecord(NamedTuple):
    """The record that a node shares with the others.

    `address` is where others reach the node; `ports` are its reserved ports for this round, by use. Its global ranks
    follow from `base_rank` and `local_world_size`.
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
    """Decode another node's record.

    Args:
        data: the stored value.
        group_rank: the group rank in the key.
        world_size: the number of workers in the round.

        Raises:
        ValueError: the data is not a record, or contains invalid values; the text is a sentence.
    """
    try:
        if len(data) > _MAX_RECORD:
            raise ValueError(f"it is {len(data)} bytes long")
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
            f"the record of group rank {group_rank} cannot be used ({printable(str(error))}); check that all nodes run "
            "the same version, and that nothing else writes to the store"
        ) from None


def _node(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_NAME or not value.isprintable():
        raise ValueError(f"its node name is {value!r}")
    return value


def _address(value: object) -> str:
    """Check a host name or numeric address."""
    if not isinstance(value, str) or len(value) > _MAX_NAME or not value:
        raise ValueError(f"its address is {value!r}")
    try:
        if ":" in value:
            socket.inet_pton(socket.AF_INET6, value)
        elif parse_endpoint(value, 1).host != value:
            raise ValueError
    except (OSError, ValueError, UserError):
        raise ValueError(f"its address is {value!r}") from None
    return value


def _ports(value: object) -> Mapping[str, tuple[int, ...]]:
    if not isinstance(value, dict) or len(value) > _MAX_USES:
        raise ValueError("it contains no table of ports")
    found = {}
    for use, ports in value.items():
        if not _USE.fullmatch(use) or not isinstance(ports, list):
            raise ValueError(f"it contains ports for the unknown use {use!r}")
        found[use] = tuple(_number(port, 1, 65535, "port") for port in ports)
    return found


def _number(value: object, least: int, most: int, what: str) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"its {what} is {value!r}, but must be from {least} to {most}")
    return value
