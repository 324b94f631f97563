"""What a candidate does in etcd, as sequences of requests: it registers and waits, takes over, leads, and leaves. Pure.

Laws of a term as the coordinator:

1. The address is published only when the server listens and no other agent is coordinator: our key still exists.
2. Of a node that is in the state, its session is the best evidence. One that is known to be dead is not waited for. One
   that we have seen lose its key shortly before is awaited for a moment only: its lease may have ended because etcd was
   away. All others, most of which have never had a key, are awaited as long as the nodes of a lost control plane are
   (`Coordinator.restore`).
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
        effects, self._effects = self._effects, []
        return effects

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
        return next((kind for kind, watch in self._watches.items() if watch == number), None)

    def has_ended(self, kind: Watched) -> None:
        """The watch of that kind has ended on its own."""
        del self._watches[kind]

    def watches(self, kind: Watched) -> bool:
        """Whether that is watched."""
        return kind in self._watches

    # Complaints

    def set_trouble(self, sentence: str) -> None:
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
        timeout: Callable[[], float | None],
    ) -> None:
        """Nothing is in progress.

        Args:
            context: takes the requests.
            on_failure: called when a procedure has ended in an error; it may begin another.
            urgent: returns the chore that is due and cannot wait for the end of the procedure in progress, if any.
            timeout: returns the seconds that a request may take; None for the client's.
        """
        self._context = context
        self._on_failure = on_failure
        self._urgent = urgent
        self._timeout = timeout
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
        self._advance(procedure, chore, lambda: next(procedure))

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
    """A live key of ours: its lease, and the fence that it makes."""

    lease: int
    fence: Fence


class ElectionView(NamedTuple):
    """The candidates' keys and the leader's key at that revision."""

    candidates: tuple[KeyValue, ...]
    leader: tuple[KeyValue, ...]
    revision: int


def find_addresses(known: tuple[str, ...]) -> Procedure[tuple[str, ...]]:
    """This machine's addresses, looked up unless they are known well enough."""
    if known and not is_loopback(known[0]):
        return known
    addresses = yield FindAddresses()  # again, after loopback: etcd's name may not have been known yet
    assert isinstance(addresses, Addresses)
    return addresses.found


def _looking(keys: ElectionKeys) -> tuple[Range, Range]:
    return Range(keys.candidates, prefix=True), Range(keys.leader)


def read_election(keys: ElectionKeys) -> Procedure[ElectionView]:
    """See who stands for election, and who leads."""
    result = yield from transact((), _looking(keys))
    candidates, leader = result.ranges
    return ElectionView(candidates.kvs, leader.kvs, result.revision)


def register(
    keys: ElectionKeys, own: NodeId, ttl_s: int, view: ElectionView, rng: Random
) -> Procedure[tuple[Registration | None, ElectionView]]:
    """Take a lease, and hang a key on it; None if others have taken all seats before us."""
    lease = yield from number_of(Grant(ttl_s))
    while free := keys.free_seats(view.candidates):
        key = rng.choice(free)
        is_free, looking = Compare(key, "create_revision", "==", 0), _looking(keys)
        result = yield from transact((is_free,), (Put(key, encode_node(own), lease), *looking), looking)
        view = ElectionView(result.ranges[0].kvs, result.ranges[1].kvs, result.revision)
        for candidate in view.candidates:  # it may not be the seat that we asked for last, if an answer was lost
            if candidate.lease == lease:
                return Registration(lease, Fence((candidate.key, candidate.create_revision))), view
    yield Revoke(lease)
    return None, view


MIN_ABSENCE = 1.0
"""Seconds that a node without a key has at least, however short the lease is: a packet may have to be sent again."""


def min_absence(settings: Settings) -> float:
    """Seconds for which a node is awaited that has lost its key."""
    return max(MIN_ABSENCE, settings.lease / 3)


class Presence:
    """The candidates' keys as we have seen them since we have one; and the nodes that have lost theirs meanwhile, by
    their numbers, with the time until which each is awaited.
    """

    def __init__(self, kvs: Iterable[KeyValue] = ()) -> None:
        self._keys = {kv.key: kv for kv in kvs}
        self._absent: dict[int, float] = {}

    @property
    def nodes(self) -> frozenset[int]:
        """The nodes that have a key."""
        return frozenset(node.number for kv in self._keys.values() if (node := decode_node(kv.value)) is not None)

    @property
    def wake_at(self) -> float:
        """The time at which `overdue` may have a result; infinity for never."""
        return min(self._absent.values(), default=float("inf"))

    def last_before(self, revision: int) -> KeyValue | None:
        """The youngest of the keys that were created before that revision."""
        older = (kv for kv in self._keys.values() if kv.create_revision < revision)
        return max(older, key=lambda kv: kv.create_revision, default=None)

    def change(self, events: Iterable[WatchEvent], until: float) -> None:
        """Keys have changed; a node that has none any more is awaited until then."""
        before = self.nodes
        for event in events:
            if event.kind == "put":
                self._keys[event.kv.key] = event.kv
            else:
                self._keys.pop(event.kv.key, None)
        self._note_absent(before, until)

    def replace(self, kvs: Iterable[KeyValue], until: float) -> None:
        """These are all keys now; nodes whose keys are gone are awaited until then."""
        before, self._keys = self.nodes, {kv.key: kv for kv in kvs}
        self._note_absent(before, until)

    def await_anew(self, since: float, until: float) -> None:
        """Await the absent nodes until then, but for those whose time was over before `since`: a node that has done
        without a key for long is no more likely to be lost than any other.
        """
        self._absent = {node: until for node, at in self._absent.items() if at >= since}

    def overdue(self, now: float) -> frozenset[int]:
        """Absent nodes whose time is over; each is returned once."""
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
    """Ends the lease of the next older candidate if its coordinator's port has no listener."""

    def __init__(self, context: StepContext) -> None:
        self.dead: frozenset[int] = frozenset()
        """The numbers of coordinators that this node has found dead."""
        self._context = context
        self._kept_at, self._from = math.inf, -math.inf

    def lease_kept(self, asked_at: float, ttl: float) -> None:
        """Our lease was granted, or kept alive, by a request of that moment.

        If etcd was away for longer than a lease, it may hold leases that their owners have given up meanwhile: a
        coordinator that stepped down by its own clock refuses connections and is alive. It has the time of a lease to
        come back.
        """
        if asked_at - self._kept_at > ttl:
            self._from = self._context.now + ttl
        self._kept_at = asked_at

    def earliest(self) -> float:
        """The earliest time at which a port that refuses connections counts as that of a dead coordinator."""
        return max(self._context.now, self._from)

    def depose(self, predecessor: KeyValue) -> Procedure[None]:
        """End its lease."""
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

    def take_over(
        self, place: Registration, addresses: tuple[str, ...], met: str, dead: frozenset[int], presence: Presence
    ) -> Procedure[None]:
        """Read what the previous coordinator has left, serve, and publish the address.

        Args:
            place: the place of this agent.
            addresses: the addresses of this machine.
            met: the coordinator that this node was last in a session with.
            dead: the numbers of nodes whose death is certain.
            presence: which nodes have a key, and which have lost theirs.

        Raises:
            EtcdLeaseGone: another candidate was elected meanwhile. After any error, there is no term.
        """
        keys, fence = self._keys, place.fence
        read = yield from transact((fence.comparison(),), (Range(keys.state, prefix=True),))
        if not read.succeeded:
            raise EtcdLeaseGone("its lease has ended")
        takeover = takeover_from(read.ranges[0].kvs, presence.nodes, met, keys, self._settings)
        if takeover.forgets:
            text = "etcd holds the data of an earlier launch of this job, of which no node is alive; it is not used"
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
        """Stop coordinating; `lives` tells whether this agent continues, as a candidate (law 3)."""
        self.term = 0
        if lives:
            try:
                yield Revoke(lease)
            except EtcdError as error:
                self._context.log(DEBUG, "its own lease could not be ended: %s", error)
        yield EndTerm(0.0 if lives else CLOSE_LINGER)

    def keep_state_alive(self) -> Procedure[None]:
        """Keep the lease alive that the state hangs on."""
        yield from number_of(RenewLease(self._state_lease))

    def remove_lost(self, nodes: frozenset[int], detail: str) -> None:
        """Treat these nodes as lost (law 2)."""
        if nodes:
            self._context.add(NodesLost(nodes, detail))


def leave(
    keys: ElectionKeys, place: Registration | None, own: NodeId, met: str, context: StepContext, *, may_be_last: bool
) -> Procedure[None]:
    """Give up our lease; where etcd cannot be reached, the lease runs out.

    Args:
        keys: of the job.
        place: ours, None if there is none.
        own: who this node is.
        met: the coordinator that this node was last in a session with, "" for none.
        context: takes lines of the log.
        may_be_last: whether this agent leaves the job, which others may have left before.
    """
    try:
        if may_be_last and (place or met):
            yield from _delete_if_last(keys, place, own, met, context)
        if place is not None:
            yield Revoke(place.lease)
    except EtcdError as error:
        context.log(INFO, "this agent cannot give up its lease in etcd, where it will run out: %s", error)


def _delete_if_last(
    keys: ElectionKeys, place: Registration | None, own: NodeId, met: str, context: StepContext
) -> Procedure[None]:
    """If we are the last, take away what the job has kept."""
    key: tuple[Operation, ...] = () if place is None else (Delete(place.fence[0]),)
    ranges = (Range(keys.candidates, prefix=True, limit=1), Range(keys.state, prefix=True))
    try:
        others, state = (yield from transact((), (*key, *ranges))).ranges
        if not others.kvs and state.kvs and _is_left_to_us(keys, state.kvs, own, met):
            yield from _delete_job_keys(keys, state.kvs[0])
    except EtcdRefused as error:  # etcd may refuse to write, and end leases all the same
        context.log(INFO, "what the job has written to etcd stays there until its lease ends: %s", error)


def _is_left_to_us(keys: ElectionKeys, stored: tuple[KeyValue, ...], own: NodeId, met: str) -> bool:
    """Whether it is the state of the job that we were in, and no agent without a key may need it any more."""
    if stored[0].key != keys.state:
        return True  # only parts: the state was never complete, so nobody can use them
    try:
        snapshot = decode_snapshot(keys.state, stored[0].value)
        state = decode_state(state_of(keys, snapshot, stored))
    except RendezvousStateError:
        return False
    others = sum(node.number != own.number for node in known_to(state))
    # Those that have still to read how the job has ended have left their keys, or never had one.
    return snapshot.incarnation == met and others < (keys.seats if state.verdict is not None else 1)


def _delete_job_keys(keys: ElectionKeys, state: KeyValue) -> Procedure[None]:
    """Delete the state, or its parts if `state` is one of those, unless anything has changed since it was read."""
    # One that has registered meanwhile may have read the state already, to continue with it.
    alone = Compare(keys.candidates, "create_revision", "==", 0, prefix=True)
    unchanged = Compare(keys.state, "mod_revision", "==", state.mod_revision if state.key == keys.state else 0)
    cleared = yield from transact((alone, unchanged), (Delete(keys.state, prefix=True),))
    if cleared.succeeded and state.lease:
        yield Revoke(state.lease)
