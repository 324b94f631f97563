"""A candidate's actions in etcd as sequences of requests: register and wait, take over, lead, and leave. Pure.

Laws of a term as the coordinator:

1. The address is published only when the server listens and no other agent is the coordinator: our key still exists.
2. For a node in the state, its session is the best evidence. A node known to be dead is not awaited. A node that just
   lost its key is awaited only for a moment: its lease might have ended because etcd was away. All others, most of
   which never had a key, are awaited like the nodes of a lost control plane (`Coordinator.restore`).
3. A live agent that stops coordinating ends its lease before its port refuses connections, because other agents
   consider an agent with a refusing port dead.
4. After stepping down, we ignore later events: the next coordinator discovers them.

Laws of leaving:

1. The last agent to leave deletes the job's keys, even if its lease just ended. Another launch's keys stay.
2. An agent without permission to write can still end its lease.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from random import Random
from typing import NamedTuple

from rallypoint.base.endpoint import is_loopback
from rallypoint.base.errors import RallypointError
from rallypoint.control.election.journal import takeover_from
from rallypoint.control.election.keys import (
    ElectionKeys,
    LeaderRecord,
    decode_node,
    decode_snapshot,
    encode_leader,
    encode_node,
    state_of,
)
from rallypoint.control.election.steps import (
    DEBUG,
    INFO,
    WARNING,
    Addresses,
    Answered,
    Ask,
    Chore,
    Effect,
    EndTerm,
    EndWatch,
    EtcdTrouble,
    Failed,
    Fence,
    FindAddresses,
    Grant,
    Listening,
    NodesLost,
    Procedure,
    RenewLease,
    Request,
    Revoke,
    StartTerm,
    Watched,
    WatchKeys,
    WriteLog,
    number_of,
    transact,
)
from rallypoint.control.etcd.api import (
    Compare,
    Delete,
    EtcdError,
    EtcdLeaseGone,
    EtcdRefused,
    KeyValue,
    Operation,
    Put,
    Range,
    WatchEvent,
)
from rallypoint.control.membership.state import NodeId, Settings, known_to, recovery_timeout
from rallypoint.control.protocol.codec import decode_state
from rallypoint.control.protocol.errors import RendezvousStateError

_WARN_INTERVAL = 300.0
"""Seconds before a problem with etcd, which might last for weeks, is logged again."""


class StepContext:
    """A step's time and its effects, in order. Does not repeat warnings."""

    def __init__(self) -> None:
        self.now = 0.0
        """When this step's event happened, in seconds on a monotonic clock."""
        self._effects: list[Effect] = []
        self._watches: dict[Watched, int] = {}
        self._count = 0
        self._trouble = ""
        self._warned_of: tuple[type[Exception], float] | None = None
        """The last logged problem, and until when it is not logged again."""

    def add(self, effect: Effect) -> None:
        """Queue an effect."""
        self._effects.append(effect)

    def pop_effects(self) -> list[Effect]:
        """Return all effects since the last call."""
        effects, self._effects = self._effects, []
        return effects

    def log(self, level: int, text: str, *args: object) -> None:
        """Log a line; `level` is as in `logging`."""
        self.add(WriteLog(level, text, args))

    # Watches: at most one of each kind

    def watch(self, kind: Watched, key: bytes, revision: int, *, prefix: bool = False) -> None:
        """Watch from the next revision on, replacing an earlier watch of this kind."""
        self.unwatch(kind)
        self._count += 1
        self._watches[kind] = self._count
        self.add(WatchKeys(kind, self._count, key, revision + 1, prefix))

    def unwatch(self, kind: Watched) -> None:
        """End the watch of that kind, if any."""
        if self._watches.pop(kind, None) is not None:
            self.add(EndWatch(kind))

    def unwatch_all(self) -> None:
        for kind in list(self._watches):
            self.unwatch(kind)

    def watched(self, number: int) -> Watched | None:
        """The kind of the watch with that number; None if it has ended."""
        return next((kind for kind, watch in self._watches.items() if watch == number), None)

    def has_ended(self, kind: Watched) -> None:
        """Note that the watch of that kind ended on its own."""
        del self._watches[kind]

    def watches(self, kind: Watched) -> bool:
        """Whether there is a watch of that kind."""
        return kind in self._watches

    # Warnings

    def set_trouble(self, sentence: str) -> None:
        """Set why etcd is unavailable; "" if it is available."""
        if sentence != self._trouble:
            self._trouble = sentence
            self.add(EtcdTrouble(sentence))

    def warn(self, error: Exception, what: str) -> None:
        """Log a problem, from time to time; with a traceback if it is unexpected."""
        if self._warned_of is not None and self._warned_of[0] is type(error) and self.now < self._warned_of[1]:
            self.log(DEBUG, "%s: %s", what, error)
            return
        self._warned_of = type(error), self.now + _WARN_INTERVAL
        unforeseen = None if isinstance(error, RallypointError) else error
        self.add(WriteLog(WARNING, "%s: %s", (what, error), unforeseen))


class _Running(NamedTuple):
    """A procedure that waits for the answer to the request of that number, and its chore, if it is one."""

    number: int
    procedure: Procedure[None]
    chore: Chore | None


class Runner:
    """Runs one procedure at a time. An urgent one can run between two of its requests."""

    def __init__(
        self,
        context: StepContext,
        on_failure: Callable[[Exception, Chore | None], None],
        urgent: Callable[[], tuple[Procedure[None], Chore] | None],
        timeout: Callable[[], float | None],
    ) -> None:
        """Start without a procedure.

        Args:
            context: takes the requests.
            on_failure: called when a procedure ends with an error; it may begin another.
            urgent: returns a due chore, if any, that cannot wait until the procedure in progress ends.
            timeout: returns the seconds for a request; None for the client's.
        """
        self._context = context
        self._on_failure = on_failure
        self._urgent = urgent
        self._timeout = timeout
        self._running: _Running | None = None
        self._held: tuple[_Running, Answered | Failed] | None = None
        """A procedure whose next request waits for an urgent chore, and the answer to continue it with."""
        self._asked = 0

    @property
    def busy(self) -> bool:
        """Whether a procedure is waiting for an answer."""
        return self._running is not None

    def begin(self, procedure: Procedure[None], chore: Chore | None = None) -> None:
        """Begin this procedure, replacing one in progress."""
        self.drop()
        self._advance(procedure, chore, lambda: next(procedure))

    def drop(self) -> None:
        """Drop the procedure in progress; a late answer is ignored."""
        self._running = self._held = None

    def go_on(self, event: Answered | Failed) -> None:
        """Continue after the request with that number succeeded or failed."""
        running = self._running
        if running is None or running.number != event.number:
            return
        if self._held is None and running.chore is None and (urgent := self._urgent()) is not None:
            self._held, (procedure, chore) = (running, event), urgent
            self._advance(procedure, chore, lambda: next(procedure))
            return
        self._resume(running, event)
        if not self.busy and self._held is not None:
            answer, self._held = self._held, None
            self._resume(*answer)

    def _resume(self, running: _Running, event: Answered | Failed) -> None:
        if isinstance(event, Answered):
            self._advance(running.procedure, running.chore, lambda: running.procedure.send(event.answer))
        else:
            self._advance(running.procedure, running.chore, lambda: running.procedure.throw(event.error))

    def _advance(self, procedure: Procedure[None], chore: Chore | None, resume: Callable[[], Request]) -> None:
        self._running = None
        try:
            request = resume()
        except StopIteration:
            if chore is not None:
                self._context.set_trouble("")
        except Exception as error:
            self._on_failure(error, chore)
        else:
            self._asked += 1
            self._running = _Running(self._asked, procedure, chore)
            self._context.add(Ask(self._asked, request, self._timeout()))


class Registration(NamedTuple):
    """Our own live key: its lease and its fence."""

    lease: int
    fence: Fence


class ElectionView(NamedTuple):
    """The candidates' keys and the leader's key at a revision."""

    candidates: tuple[KeyValue, ...]
    leader: tuple[KeyValue, ...]
    revision: int


def find_addresses(known: tuple[str, ...]) -> Procedure[tuple[str, ...]]:
    """Return this machine's addresses; look them up unless known well enough."""
    if known and not is_loopback(known[0]):
        return known
    addresses = yield FindAddresses()  # again after a loopback address: etcd's name might not have resolved before
    assert isinstance(addresses, Addresses)
    return addresses.found


def _looking(keys: ElectionKeys) -> tuple[Range, Range]:
    return Range(keys.candidates, prefix=True), Range(keys.leader)


def read_election(keys: ElectionKeys) -> Procedure[ElectionView]:
    """Read the candidates and the leader."""
    result = yield from transact((), _looking(keys))
    candidates, leader = result.ranges
    return ElectionView(candidates.kvs, leader.kvs, result.revision)


def register(
    keys: ElectionKeys, own: NodeId, ttl_s: int, view: ElectionView, rng: Random
) -> Procedure[tuple[Registration | None, ElectionView]]:
    """Take a lease, and attach a key to it; None if others took all seats."""
    lease = yield from number_of(Grant(ttl_s))
    while free := keys.free_seats(view.candidates):
        key = rng.choice(free)
        is_free, looking = Compare(key, "create_revision", "==", 0), _looking(keys)
        result = yield from transact((is_free,), (Put(key, encode_node(own), lease), *looking), looking)
        view = ElectionView(result.ranges[0].kvs, result.ranges[1].kvs, result.revision)
        for candidate in view.candidates:  # if an answer was lost, it might not be the last requested seat
            if candidate.lease == lease:
                return Registration(lease, Fence((candidate.key, candidate.create_revision))), view
    yield Revoke(lease)
    return None, view


MIN_ABSENCE = 1.0
"""Minimum seconds to await a node without a key, even with a short lease: a packet might have to be sent again."""


def min_absence(settings: Settings) -> float:
    """Seconds for which a node without its key is awaited."""
    return max(MIN_ABSENCE, settings.lease / 3)


class Presence:
    """Candidates' keys as seen since we have one, and nodes that lost theirs since, by number, with the time until
    which to await each."""

    def __init__(self, kvs: Iterable[KeyValue] = ()) -> None:
        self._keys = {kv.key: kv for kv in kvs}
        self._absent: dict[int, float] = {}

    @property
    def nodes(self) -> frozenset[int]:
        """The nodes that have a key."""
        return frozenset(node.number for kv in self._keys.values() if (node := decode_node(kv.value)) is not None)

    @property
    def wake_at(self) -> float:
        """When `overdue` might next have a result; infinity for never."""
        return min(self._absent.values(), default=float("inf"))

    def last_before(self, revision: int) -> KeyValue | None:
        """The youngest key created before that revision."""
        older = (kv for kv in self._keys.values() if kv.create_revision < revision)
        return max(older, key=lambda kv: kv.create_revision, default=None)

    def change(self, events: Iterable[WatchEvent], until: float) -> None:
        """Apply changes of keys; a node without a key is awaited until then."""
        before = self.nodes
        for event in events:
            if event.kind == "put":
                self._keys[event.kv.key] = event.kv
            else:
                self._keys.pop(event.kv.key, None)
        self._note_absent(before, until)

    def replace(self, kvs: Iterable[KeyValue], until: float) -> None:
        """Replace all keys; await nodes whose keys are gone until then."""
        before, self._keys = self.nodes, {kv.key: kv for kv in kvs}
        self._note_absent(before, until)

    def await_anew(self, since: float, until: float) -> None:
        """Await absent nodes until then, except those whose deadline passed before `since`: a node long without a key
        is no more likely to be lost than any other."""
        self._absent = {node: until for node, at in self._absent.items() if at >= since}

    def overdue(self, now: float) -> frozenset[int]:
        """Absent nodes whose deadline passed; each is returned once."""
        over = frozenset(node for node, until in self._absent.items() if until <= now)
        for node in over:
            del self._absent[node]
        return over

    def _note_absent(self, before: frozenset[int], until: float) -> None:
        present = self.nodes
        for node in before - present:
            self._absent.setdefault(node, until)
        for node in present & self._absent.keys():
            del self._absent[node]


class Deposing:
    """Ends the next older candidate's lease if its coordinator's port has no listener."""

    def __init__(self, context: StepContext) -> None:
        self.dead: frozenset[int] = frozenset()
        """Numbers of coordinators that this node found dead."""
        self._context = context
        self._kept_at, self._from = math.inf, -math.inf

    def lease_kept(self, asked_at: float, ttl: float) -> None:
        """Note that a request at that time granted our lease or kept it alive.

        If etcd was away for longer than a lease, it might contain leases that their owners gave up: a coordinator that
        stepped down by its own clock refuses connections but is alive. It gets one lease to return.
        """
        if asked_at - self._kept_at > ttl:
            self._from = self._context.now + ttl
        self._kept_at = asked_at

    def earliest(self) -> float:
        """When a refusing port counts as a dead coordinator's at the earliest."""
        return max(self._context.now, self._from)

    def depose(self, predecessor: KeyValue) -> Procedure[None]:
        """End the predecessor's lease."""
        if (node := decode_node(predecessor.value)) is not None:
            text = (
                "no process is listening at the address of the coordinator %s any more, so its lease is being revoked"
            )
            self._context.log(DEBUG if node.number in self.dead else WARNING, text, node)
            self.dead |= {node.number}
        try:
            yield Revoke(predecessor.lease)
        except EtcdError as error:
            self._context.log(DEBUG, "that coordinator's lease could not be revoked: %s", error)


CLOSE_LINGER = 2.0
"""Seconds for nodes to read a leaving coordinator's last notifications."""
STATE_TTL = 600
"""Seconds for which the state outlives the last coordinator."""


class Leadership:
    """This agent's terms, one after another."""

    def __init__(self, keys: ElectionKeys, settings: Settings, context: StepContext) -> None:
        self.term = 0
        """Number of the current term; 0 for none."""
        self.deposed = ""
        """Why this term must end."""
        self._keys = keys
        self._settings = settings
        self._context = context
        self._terms = 0
        self._state_lease = 0

    def take_over(
        self, place: Registration, addresses: tuple[str, ...], met: str, dead: frozenset[int], presence: Presence
    ) -> Procedure[None]:
        """Read the previous coordinator's state, serve, and publish the address.

        Args:
            place: this agent's registration.
            addresses: the addresses of this machine.
            met: the coordinator of this node's last session.
            dead: the numbers of nodes whose death is certain.
            presence: the nodes with a key, and those that lost theirs.

        Raises:
            EtcdLeaseGone: another candidate was elected. After any error, there is no term.
        """
        keys, fence = self._keys, place.fence
        read = yield from transact((fence.comparison(),), (Range(keys.state, prefix=True),))
        if not read.succeeded:
            raise EtcdLeaseGone("its lease has ended")
        takeover = takeover_from(read.ranges[0].kvs, presence.nodes, met, keys, self._settings)
        if takeover.forgets:
            text = (
                "etcd contains data from an earlier launch of this job, whose nodes are all gone, so the data is "
                "ignored"
            )
            self._context.log(INFO, text)
        if not takeover.lease:
            takeover = takeover._replace(lease=(yield from number_of(Grant(STATE_TTL))))
        self._terms += 1
        self.term, self.deposed, self._state_lease = self._terms, "", takeover.lease
        try:
            listening = yield StartTerm(self.term, fence, addresses, takeover)
            assert isinstance(listening, Listening)
            self.remove_lost(dead - presence.nodes, "its machine refuses connections")
            now = self._context.now
            presence.await_anew(now - recovery_timeout(self._settings), now + min_absence(self._settings))
            yield from self._announce(place, listening)
        except Exception:
            self.term = 0
            yield EndTerm(0.0)
            raise
        self._context.log(
            INFO, "this agent is the coordinator of job %r, on port %d", self._settings.run_id, listening.port
        )

    def _announce(self, place: Registration, listening: Listening) -> Procedure[None]:
        record = LeaderRecord(listening.addresses, listening.port, place.lease, listening.secret)
        put = Put(self._keys.leader, encode_leader(record), place.lease)
        if not (yield from transact((place.fence.comparison(),), (put,))).succeeded:
            raise EtcdLeaseGone("its lease has ended")

    def step_down(self, lease: int, *, lives: bool) -> Procedure[None]:
        """Stop coordinating; `lives`: this agent continues as a candidate (law 3)."""
        self.term = 0
        if lives:
            try:
                yield Revoke(lease)
            except EtcdError as error:
                self._context.log(DEBUG, "this agent's own lease could not be revoked: %s", error)
        yield EndTerm(0.0 if lives else CLOSE_LINGER)

    def keep_state_alive(self) -> Procedure[None]:
        """Keep the state's lease alive."""
        yield from number_of(RenewLease(self._state_lease))

    def remove_lost(self, nodes: frozenset[int], detail: str) -> None:
        """Treat these nodes as lost (law 2)."""
        if nodes:
            self._context.add(NodesLost(nodes, detail))


def leave(
    keys: ElectionKeys, place: Registration | None, own: NodeId, met: str, context: StepContext, *, may_be_last: bool
) -> Procedure[None]:
    """Give up our lease. If etcd cannot be reached, the lease expires.

    Args:
        keys: the keys of the job.
        place: our registration, None for none.
        own: this node.
        met: the coordinator of this node's last session, "" for none.
        context: logs lines.
        may_be_last: whether this agent leaves the job, perhaps as the last one.
    """
    try:
        if may_be_last and (place or met):
            yield from _delete_if_last(keys, place, own, met, context)
        if place is not None:
            yield Revoke(place.lease)
    except EtcdError as error:
        context.log(INFO, "this agent cannot revoke its lease in etcd, so the lease will expire: %s", error)


def _delete_if_last(
    keys: ElectionKeys, place: Registration | None, own: NodeId, met: str, context: StepContext
) -> Procedure[None]:
    """If we are the last agent, delete the job's keys."""
    key: tuple[Operation, ...] = () if place is None else (Delete(place.fence[0]),)
    ranges = (Range(keys.candidates, prefix=True, limit=1), Range(keys.state, prefix=True))
    try:
        others, state = (yield from transact((), (*key, *ranges))).ranges
        if not others.kvs and state.kvs and _is_left_to_us(keys, state.kvs, own, met):
            yield from _delete_job_keys(keys, state.kvs[0])
    except EtcdRefused as error:  # etcd might refuse writes but still end leases
        context.log(INFO, "the job's data will stay in etcd until its lease expires: %s", error)


def _is_left_to_us(keys: ElectionKeys, stored: tuple[KeyValue, ...], own: NodeId, met: str) -> bool:
    """Whether the state belongs to our job, and no agent without a key might still need it."""
    if stored[0].key != keys.state:
        return True  # only parts of an incomplete state, which nobody can use
    try:
        snapshot = decode_snapshot(keys.state, stored[0].value)
        state = decode_state(state_of(keys, snapshot, stored))
    except RendezvousStateError:
        return False
    others = sum(node.number != own.number for node in known_to(state))
    # Agents that still have to read how the job ended gave up their keys, or never had one.
    return snapshot.incarnation == met and others < (keys.seats if state.verdict is not None else 1)


def _delete_job_keys(keys: ElectionKeys, state: KeyValue) -> Procedure[None]:
    """Delete the state, or its parts if `state` is one, unless anything changed since it was read."""
    # An agent that just registered might already have read the state, to continue with it.
    alone = Compare(keys.candidates, "create_revision", "==", 0, prefix=True)
    unchanged = Compare(keys.state, "mod_revision", "==", state.mod_revision if state.key == keys.state else 0)
    cleared = yield from transact((alone, unchanged), (Delete(keys.state, prefix=True),))
    if cleared.succeeded and state.lease:
        yield Revoke(state.lease)
