"""What a candidate does in etcd, as sequences of requests: it registers and waits, takes over, leads, and leaves. Pure.

Laws of a term as the coordinator:

1. The address is published only when the server listens and no other agent is coordinator: our key still exists.
2. A node that is known to be dead is not waited for; one without a key for a while, and then it is lost.
3. An agent that stops coordinating and is alive ends its lease before its port refuses connections: other agents take
   one whose port refuses for dead.
4. From the moment that we step down, we know nothing about further events: the next coordinator has to find them out.

Laws of leaving:

1. The last agent to leave leaves nothing of the job in etcd, even if its lease has ended just before. Keys of another
   launch of the job stay.
2. An agent that may not write may still end its lease.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from rallypoint.base.endpoint import is_loopback
from rallypoint.base.errors import RallypointError
from rallypoint.control.election.keys import (
    ElectionKeys,
    LeaderRecord,
    decode_node,
    decode_snapshot,
    encode_leader,
    encode_node,
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
    KeepLeaseAlive,
    Listening,
    NodesLost,
    Procedure,
    Request,
    Revoke,
    StartTerm,
    Watched,
    WatchKeys,
    WriteLog,
    number_of,
    transact,
)
from rallypoint.control.election.takeover import Presence, min_absence, takeover_from, wait_for_missing
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
    TxnResult,
    WatchEvent,
)
from rallypoint.control.membership.state import NodeId, Settings, known_to
from rallypoint.control.protocol.errors import RendezvousStateError

_WARN_INTERVAL = 300.0
"""Seconds until the log says again what is wrong with etcd, for weeks perhaps."""


class StepContext:
    """The time of a step and its effects, in order. Repeats no complaint."""

    def __init__(self) -> None:
        self.now = 0.0
        """When this step's event happened, in seconds on a monotonic clock."""
        self._effects: list[Effect] = []
        self._watches: dict[Watched, int] = {}
        self._count = 0
        self._trouble = ""
        self._warned_of: tuple[type[Exception], float] | None = None
        """The last problem that was logged, and until when it is not logged again."""

    def add(self, effect: Effect) -> None:
        """One more."""
        self._effects.append(effect)

    def pop_effects(self) -> list[Effect]:
        """All since the last time."""
        taken, self._effects = self._effects, []
        return taken

    def log(self, level: int, text: str, *args: object) -> None:
        """A line of the log; `level` as `logging` has it."""
        self.add(WriteLog(level, text, args))

    # Watches: one of each kind at most

    def watch(self, kind: Watched, key: bytes, revision: int, *, prefix: bool = False) -> None:
        """Watch from after that revision on, instead of what was watched before."""
        self.unwatch(kind)
        self._count += 1
        self._watches[kind] = self._count
        self.add(WatchKeys(kind, self._count, key, revision + 1, prefix))

    def unwatch(self, kind: Watched) -> None:
        """End the watch of that kind, if it is on."""
        if self._watches.pop(kind, None) is not None:
            self.add(EndWatch(kind))

    def unwatch_all(self) -> None:
        """End all watches that are on."""
        for kind in list(self._watches):
            self.unwatch(kind)

    def watched(self, number: int) -> Watched | None:
        """The kind of the watch with that number; None if it has ended."""
        return next((kind for kind, each in self._watches.items() if each == number), None)

    def has_ended(self, kind: Watched) -> None:
        """The watch of that kind has ended on its own."""
        del self._watches[kind]

    def watches(self, kind: Watched) -> bool:
        """Whether that is watched."""
        return kind in self._watches

    # Complaints

    def trouble(self, sentence: str) -> None:
        """Why etcd cannot be asked; "" when it could be."""
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
    """The procedure that waits for the answer to the request of that number; which chore it is, if it is one."""

    number: int
    procedure: Procedure[None]
    chore: Chore | None


class Runner:
    """The procedure in progress, if there is one; between two of its requests, one that cannot wait for its end."""

    def __init__(
        self,
        context: StepContext,
        on_failure: Callable[[Exception, Chore | None], None],
        urgent: Callable[[], tuple[Procedure[None], Chore] | None],
    ) -> None:
        """Nothing is in progress.

        Args:
            context: takes the requests.
            on_failure: called when a procedure has ended in an error; it may begin another.
            urgent: returns the chore that is due and cannot wait for the end of the procedure in progress, if any.
        """
        self._context = context
        self._on_failure = on_failure
        self._urgent = urgent
        self._running: _Running | None = None
        self._held: tuple[_Running, Answered | Failed] | None = None
        """A procedure whose next request waits for an urgent chore, and the answer with which it continues."""
        self._asked = 0

    @property
    def busy(self) -> bool:
        """Whether an answer is waited for."""
        return self._running is not None

    def begin(self, procedure: Procedure[None], chore: Chore | None = None) -> None:
        """Begin this procedure instead of the one in progress."""
        self.drop()
        self._take(procedure, chore, lambda: next(procedure))

    def drop(self) -> None:
        """Drop what is in progress; a late answer is ignored."""
        self._running = self._held = None

    def go_on(self, event: Answered | Failed) -> None:
        """The request of that number is done, or could not be."""
        running = self._running
        if running is None or running.number != event.number:
            return
        if self._held is None and running.chore is None and (urgent := self._urgent()) is not None:
            self._held, (procedure, chore) = (running, event), urgent
            self._take(procedure, chore, lambda: next(procedure))
            return
        self._resume(running, event)
        if not self.busy and self._held is not None:
            held, self._held = self._held, None
            self._resume(*held)

    def _resume(self, running: _Running, event: Answered | Failed) -> None:
        if isinstance(event, Answered):
            self._take(running.procedure, running.chore, lambda: running.procedure.send(event.answer))
        else:
            self._take(running.procedure, running.chore, lambda: running.procedure.throw(event.error))

    def _take(self, procedure: Procedure[None], chore: Chore | None, resume: Callable[[], Request]) -> None:
        self._running = None
        try:
            request = resume()
        except StopIteration:
            if chore is not None:
                self._context.trouble("")
        except Exception as error:
            self._on_failure(error, chore)
        else:
            self._asked += 1
            self._running = _Running(self._asked, procedure, chore)
            self._context.add(Ask(self._asked, request))


TIMEOUT = 2.0
"""Seconds for each of the last requests to etcd."""
_NO_REVISION = 2**62
"""A revision that etcd will not have."""


class Predecessor(NamedTuple):
    """The next older candidate at that revision, if there was any."""

    kv: KeyValue | None
    revision: int


class Registration(NamedTuple):
    """A live key of ours: its lease, and the fence that it makes."""

    lease: int
    fence: Fence


class NewRegistration(NamedTuple):
    """A new place; the next older candidate, if that was seen when it was made; and the value of the leader's key."""

    place: Registration
    predecessor: Predecessor | None
    leader: tuple[KeyValue, ...]
    revision: int


def find_addresses(known: tuple[str, ...]) -> Procedure[tuple[str, ...]]:
    """This machine's addresses, looked up unless they are known well enough."""
    if known and not is_loopback(known[0]):
        return known
    addresses = yield FindAddresses()  # again, after loopback: etcd's name may not have been known yet
    assert isinstance(addresses, Addresses)
    return addresses.found


def register(keys: ElectionKeys, own: NodeId, ttl_s: int) -> Procedure[NewRegistration]:
    """Take a lease and hang a key on it."""
    lease = yield from number_of(Grant(ttl_s))
    key = keys.node(lease)
    put, youngest = (
        Put(key, encode_node(own), lease),
        Range(keys.nodes, prefix=True, limit=2, last_before=_NO_REVISION),
    )
    result = yield from transact((), (put, Range(key), youngest, Range(keys.leader)))
    mine, last, leader = result.ranges
    predecessor = None
    if last.kvs[0].key == key:  # else it was sent before, unanswered, and others have come since
        predecessor = Predecessor(last.kvs[1] if len(last.kvs) > 1 else None, result.revision)
    place = Registration(lease, Fence((key, mine.kvs[0].create_revision)))
    return NewRegistration(place, predecessor, leader.kvs, result.revision)


def next_older(keys: ElectionKeys, fence: Fence) -> Procedure[Predecessor]:
    """Find the candidate just before us."""
    result = yield from transact((), (Range(keys.nodes, prefix=True, last_before=fence[1]),))
    (older,) = result.ranges
    return Predecessor(next(iter(older.kvs), None), result.revision)


class PredecessorWait:
    """Waits until the next older candidate leaves, while there is one."""

    def __init__(self, context: StepContext) -> None:
        self.gone_at = math.inf
        """When that candidate was seen to be gone, or is to be looked for."""
        self.dead: frozenset[int] = frozenset()
        """The numbers of coordinators that this node has found dead."""
        self._context = context
        self._predecessor: KeyValue | None = None
        self._kept_at, self._depose_from = math.inf, -math.inf

    def lease_kept(self, asked_at: float, ttl: float) -> None:
        """Our lease was granted, or kept alive, by a request of that moment.

        If etcd was away for longer than a lease, it may hold leases that their owners have given up meanwhile: a
        coordinator that stepped down by its own clock refuses connections and is alive. It has the time of a lease to
        come back.
        """
        if asked_at - self._kept_at > ttl:
            self._depose_from = self._context.now + ttl
        self._kept_at = asked_at

    def depose_at(self) -> float:
        """The earliest time at which a port that refuses connections counts as that of a dead coordinator."""
        return max(self._context.now, self._depose_from)

    def begin(self, predecessor: KeyValue, revision: int) -> None:
        """Wait for that one."""
        self._predecessor, self.gone_at = predecessor, math.inf
        self._context.watch(Watched.PREDECESSOR, predecessor.key, revision)

    def end(self) -> None:
        """Wait no more."""
        self._predecessor, self.gone_at = None, math.inf
        self._context.unwatch(Watched.PREDECESSOR)

    def is_for(self, lease: int) -> bool:
        """Whether it is the holder of that lease that is waited for."""
        return self._predecessor is not None and self._predecessor.lease == lease

    def depose(self) -> Procedure[None]:
        """End its lease: its coordinator's port has no listener."""
        predecessor = self._predecessor
        if predecessor is None:
            return
        if (node := decode_node(predecessor.value)) is not None:
            text = "no process listens any more at the address of the coordinator %s; its lease is ended"
            self._context.log(DEBUG if node.number in self.dead else WARNING, text, node)
            self.dead |= {node.number}
        try:
            yield Revoke(predecessor.lease)
        except EtcdError as error:
            self._context.log(DEBUG, "its lease could not be ended: %s", error)


CLOSE_LINGER = 2.0
"""Seconds that nodes have to read the last notifications of a coordinator that leaves."""
STATE_TTL = 600
"""Seconds for which the state outlives the last coordinator that kept it alive."""


class Leadership:
    """This agent's terms, one after another."""

    def __init__(self, keys: ElectionKeys, settings: Settings, context: StepContext) -> None:
        """No term is on."""
        self.term = 0
        """The number of the term that is on; 0 for none."""
        self.deposed = ""
        """Why this term has to end."""
        self._keys = keys
        self._settings = settings
        self._context = context
        self._terms = 0
        self._state_lease = 0
        self._presence = Presence()

    @property
    def wake_at(self) -> float:
        """When `lose_overdue` has something to do."""
        return self._presence.wake_at if self.term else math.inf

    def take_over(
        self, place: Registration, addresses: tuple[str, ...], met: str, dead: frozenset[int], *, waited: bool
    ) -> Procedure[None]:
        """Read what the previous coordinator has left, serve, and publish the address.

        Args:
            place: the place of this agent.
            addresses: the addresses of this machine.
            met: the coordinator that this node was last in a session with.
            dead: the numbers of nodes whose death is certain.
            waited: whether it was a candidate already when there was a coordinator.

        Raises:
            EtcdLeaseGone: another candidate was elected meanwhile. After any error, there is no term.
        """
        keys, fence = self._keys, place.fence
        read = yield from transact((fence.comparison(),), (Range(keys.state), Range(keys.nodes, prefix=True)))
        if not read.succeeded:
            raise EtcdLeaseGone("its lease has ended")
        stored, nodes = read.ranges
        presence = Presence(nodes.kvs)
        takeover = takeover_from(stored.kvs, presence.nodes, met, keys, self._settings)
        if takeover.forgets:
            text = "etcd holds the data of an earlier launch of this job, of which no node is alive; it is not used"
            self._context.log(INFO, text)
        if not takeover.lease:
            takeover = takeover._replace(lease=(yield from number_of(Grant(STATE_TTL))))
        self._terms += 1
        self.term, self.deposed, self._presence, self._state_lease = self._terms, "", presence, takeover.lease
        try:
            listening = yield StartTerm(self.term, fence, addresses, takeover)
            assert isinstance(listening, Listening)
            self._lose(dead - presence.nodes, "its machine refuses connections")
            seconds = wait_for_missing(self._settings, waited=waited)
            presence.wait_for((each.number for each in known_to(takeover.state)), self._context.now + seconds)
            yield from self._announce(place, listening)
        except Exception:
            self.term = 0
            yield EndTerm(0.0)
            raise
        self._watch(read)
        self._context.log(
            INFO, "this agent is the coordinator of job %r, on port %d", self._settings.run_id, listening.port
        )

    def _announce(self, place: Registration, listening: Listening) -> Procedure[None]:
        record = LeaderRecord(listening.addresses, listening.port, place.lease, listening.secret)
        put = Put(self._keys.leader, encode_leader(record), place.lease)
        if not (yield from transact((place.fence.comparison(),), (put,))).succeeded:
            raise EtcdLeaseGone("its lease has ended")

    def step_down(self, lease: int, *, lives: bool) -> Procedure[None]:
        """Stop coordinating; `lives` tells whether this agent goes on, as a candidate (law 3)."""
        self.term = 0
        if lives:
            try:
                yield Revoke(lease, TIMEOUT)
            except EtcdError as error:
                self._context.log(DEBUG, "its own lease could not be ended: %s", error)
        self._context.unwatch(Watched.NODES)
        yield EndTerm(0.0 if lives else CLOSE_LINGER)

    def keep_state_alive(self) -> Procedure[None]:
        """Keep the lease alive that the state hangs on."""
        yield from number_of(KeepLeaseAlive(self._state_lease))

    # Who is lost

    def changed(self, events: tuple[WatchEvent, ...]) -> None:
        """Keys of nodes have changed."""
        self._presence.change(events, self._context.now + min_absence(self._settings))

    def find_nodes(self) -> Procedure[None]:
        """Read what a watch that has ended would have reported, and watch on."""
        read = yield from transact((), (Range(self._keys.nodes, prefix=True),))
        self._presence.replace(read.ranges[0].kvs, self._context.now + min_absence(self._settings))
        self._watch(read)

    def lose_overdue(self) -> None:
        """Treat nodes whose time is over as lost (law 2)."""
        self._lose(self._presence.overdue(self._context.now), "its lease in etcd has ended")

    def _lose(self, nodes: frozenset[int], detail: str) -> None:
        if nodes:
            self._context.add(NodesLost(nodes, detail))

    def _watch(self, read: TxnResult) -> None:
        self._context.watch(Watched.NODES, self._keys.nodes, read.revision, prefix=True)


def leave(keys: ElectionKeys, lease: int, met: str, context: StepContext, *, for_good: bool) -> Procedure[None]:
    """Give up our lease; where etcd cannot be reached, the lease runs out.

    Args:
        keys: of the job.
        lease: ours, 0 if there is none.
        met: the coordinator that this node was last in a session with, "" for none.
        context: takes lines of the log.
        for_good: whether this agent leaves the job: then it may be the last.
    """
    try:
        if for_good and (lease or met):
            yield from _delete_if_last(keys, lease, met, context)
        if lease:
            yield Revoke(lease, TIMEOUT)
    except EtcdError as error:
        context.log(INFO, "this agent cannot give up its lease in etcd, where it will run out: %s", error)


def _delete_if_last(keys: ElectionKeys, lease: int, met: str, context: StepContext) -> Procedure[None]:
    """If we are the last, take away what the job has kept."""
    own: tuple[Operation, ...] = (Delete(keys.node(lease)),) if lease else ()
    look = (Range(keys.nodes, prefix=True, limit=1), Range(keys.state))
    try:
        others, state = (yield from transact((), (*own, *look), timeout_s=TIMEOUT)).ranges
        if not others.kvs and state.kvs and _is_of(keys, state.kvs[0], met):
            yield from _delete_job_keys(keys, state.kvs[0])
    except EtcdRefused as error:  # etcd may refuse to write, and end leases all the same
        context.log(INFO, "what the job has written to etcd stays there until its lease ends: %s", error)


def _is_of(keys: ElectionKeys, state: KeyValue, met: str) -> bool:
    """Whether it is the state of the job that we were in."""
    try:
        return decode_snapshot(keys.state, state.value).incarnation == met
    except RendezvousStateError:
        return False


def _delete_job_keys(keys: ElectionKeys, state: KeyValue) -> Procedure[None]:
    # One that has registered meanwhile may have read the state already, to continue with it.
    alone = Compare(keys.nodes, "create_revision", "==", 0, prefix=True)
    unchanged = Compare(keys.state, "mod_revision", "==", state.mod_revision)
    cleared = yield from transact((alone, unchanged), (Delete(keys.state),), timeout_s=TIMEOUT)
    if cleared.succeeded and state.lease:
        yield Revoke(state.lease, TIMEOUT)
