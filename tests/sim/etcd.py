"""An etcd in virtual time: one place, one order of all operations, leases, watches, and connections to it that fail.

Laws:

1. Each request takes effect at one moment, completely or not at all. A client without the answer does not know which.
2. While etcd is away (no member has a leader), leases stand still, and have their whole time again when it is back. A
   client that alone cannot reach it loses its lease.
3. A watch reports each change once and in order, however late.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from rallypoint.control.election.steps import Txn
from rallypoint.control.etcd.api import (
    Compare,
    Delete,
    EtcdLeaseGone,
    EtcdUnreachable,
    KeyValue,
    Operation,
    Put,
    Range,
    RangeResult,
    TxnResult,
    WatchCancelled,
    WatchEnd,
    WatchEvent,
)
from tests.sim.coroutine import Begin, OneShot, Resume, Steps
from tests.sim.world import Process, World

_TIMEOUT = 3.0
"""Seconds that a request has where it says nothing else."""
_LOST = object()
"""What a request that was sent and not answered has for an answer."""
_UNSENT = object()
"""What one has that could not be sent."""

Apply = Callable[[], object]


class _Lease:
    __slots__ = ("owner", "ttl", "until")

    def __init__(self, ttl: float, until: float, owner: int) -> None:
        self.ttl = ttl
        self.until = until
        self.owner = owner


class Etcd:
    """What is stored, and who can reach it."""

    def __init__(self, world: World, rng: Random, delay: float) -> None:
        self.world = world
        self.rng = rng
        self.revision = 1
        self.stored: dict[bytes, KeyValue] = {}
        self.log: list[WatchEvent] = []
        self.watches: list[SimWatch] = []
        self.losing = 0
        """How many faults make it lose answers just now."""
        self.slow = 0.0
        """Seconds that a request takes at most, beside the usual delay."""
        self.unsure_until = 0.0
        """Until when it was slow, or lost answers."""
        self.well_since = 0.0
        """Since when everybody can use it."""
        self.key_lost_at = -math.inf
        """When a key ended last that its owner had not given up."""
        self.unanswered: set[int] = set()
        """The nodes whose last request had no answer in its time."""
        self._delay = delay
        self._leases: dict[int, _Lease] = {}
        self._away = 0
        self._cut: Counter[int] = Counter()

    # Faults

    def reaches(self, node: int) -> bool:
        """Whether the node can use it."""
        return not self._away and not self._cut[node]

    def is_cut(self, node: int) -> bool:
        """Whether the node alone cannot reach it."""
        return self._cut[node] > 0

    @property
    def is_away(self) -> bool:
        """Whether nobody can use it."""
        return self._away > 0

    @property
    def is_well(self) -> bool:
        """Whether everybody can use it."""
        return not self._away and not +self._cut and not self.losing and not self.slow

    def go_away(self) -> None:
        """No member has a leader from now on."""
        self._away += 1

    def come_back(self) -> None:
        """There is a leader again: leases begin anew."""
        self._away -= 1
        if not self._away:
            for number, lease in self._leases.items():
                lease.until = self.world.now + lease.ttl
                self.world.at(lease.until, self._look_at_lease, number)
            self.reached()

    def cut(self, node: int) -> None:
        """From now on the node cannot reach it."""
        self._cut[node] += 1

    def heal(self, node: int) -> None:
        """The node can reach it again."""
        self._cut[node] -= 1
        self.reached()

    def reached(self) -> None:
        """Somebody may be reached again: watches tell what they have held back."""
        self.well_since = self.world.now
        for watch in list(self.watches):
            watch.pump()

    def drop_watches(self, node: int) -> None:
        """The node's watches end."""
        for watch in [each for each in self.watches if each.client.node == node]:
            watch.drop()

    def delay(self, rng: Random) -> float:
        """Seconds from a node to here, or back."""
        return self._delay * rng.uniform(0.2, 2.0) + (rng.uniform(0.0, self.slow) if self.slow else 0.0)

    # What can be asked

    def txn(
        self, compares: Sequence[Compare], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> TxnResult:
        """Compare and do, in one step."""
        holds = all(self._holds(each) for each in compares)
        operations = then if holds else otherwise
        for each in operations:
            if isinstance(each, Put) and each.lease and each.lease not in self._leases:
                raise EtcdLeaseGone("requested lease not found")
        changes = [each for each in operations if not isinstance(each, Range)]
        if changes:
            self.revision += 1
        results = [self._do(each) for each in operations]
        self._tell()
        return TxnResult(holds, self.revision, tuple(each for each in results if each is not None))

    def grant(self, lease: int, ttl: float, owner: int = -1) -> None:
        """A new lease, of that node."""
        self._leases[lease] = _Lease(ttl, self.world.now + ttl, owner)
        self.world.after(ttl, self._look_at_lease, lease)

    def keep_alive(self, lease: int) -> int:
        """Begin its time anew; returns its seconds, 0 if it is gone."""
        found = self._leases.get(lease)
        if found is None:
            return 0
        found.until = self.world.now + found.ttl
        return int(found.ttl)

    def revoke(self, lease: int, by: int | None = None) -> None:
        """End a lease and what hangs on it, by a node or because its time is over."""
        found = self._leases.pop(lease, None)
        if found is None:
            return
        gone = [key for key, each in self.stored.items() if each.lease == lease]
        self.world.note("etcd", "lease %x ends: %s", lease, gone)
        if gone and by != found.owner:
            self.key_lost_at = self.world.now
        self.revision += bool(gone)
        for key in gone:
            self._do(Delete(key))
        self._tell()

    # Inside

    def _look_at_lease(self, number: int) -> None:
        lease = self._leases.get(number)
        if lease is None or self._away:
            return
        if self.world.now < lease.until - 1e-9:
            self.world.at(lease.until, self._look_at_lease, number)
        else:
            self.revoke(number)

    def _holds(self, compare: Compare) -> bool:
        assert compare.relation == "==", compare
        assert compare.field in ("create_revision", "mod_revision"), compare
        if compare.prefix:
            keys = [key for key in self.stored if key.startswith(compare.key)] or [compare.key]
            return all(self._holds(compare._replace(key=key, prefix=False)) for key in keys)
        found = self.stored.get(compare.key)
        number = 0 if found is None else getattr(found, compare.field)
        return bool(number == compare.operand)

    def _do(self, operation: Operation) -> RangeResult | None:
        match operation:
            case Put(key=key, value=value, lease=lease):
                before = self.stored.get(key)
                created = self.revision if before is None else before.create_revision
                version = 1 if before is None else before.version + 1
                self.stored[key] = KeyValue(key, value, created, self.revision, version, lease)
                self.log.append(WatchEvent("put", self.stored[key]))
                return None
            case Delete(key=key, prefix=prefix):
                gone = self._under(key, prefix=prefix)
                for each in gone:
                    del self.stored[each.key]
                    self.log.append(WatchEvent("delete", KeyValue(each.key, b"", 0, self.revision, 0, 0)))
                return None
            case Range(key=key, prefix=prefix, limit=limit):
                found = self._under(key, prefix=prefix)
                return RangeResult(self.revision, tuple(found[:limit] if limit else found))

    def _under(self, key: bytes, *, prefix: bool) -> list[KeyValue]:
        if not prefix:
            return [self.stored[key]] if key in self.stored else []
        return sorted(each for name, each in self.stored.items() if name.startswith(key))

    def _tell(self) -> None:
        if self.log and self.log[-1].kv.mod_revision == self.revision:
            for watch in self.watches:
                watch.plan()


class SimClient:
    """One node's way to it: what `EtcdClient` does, for strands. A `Watcher`."""

    def __init__(self, etcd: Etcd, process: Process, node: int, rng: Random) -> None:
        self.etcd = etcd
        self.process = process
        self.node = node
        self.rng = rng

    def make(self, txn: Txn, timeout: float | None = None, done: Callable[[], None] | None = None) -> Steps[TxnResult]:
        """See `EtcdClient.txn`; it is sent again when its answer was lost. `done` is called when its `then` is done."""

        def apply() -> TxnResult:
            result = self.etcd.txn(txn.compares, txn.then, txn.otherwise)
            if result.succeeded and done is not None:
                done()
            return result

        result = yield from self._ask(apply, timeout)
        assert isinstance(result, TxnResult)
        return result

    def lease_grant(self, ttl: float, timeout: float | None = None) -> Steps[int]:
        """See `EtcdClient.lease_grant`."""
        lease = self.rng.getrandbits(62) + 1
        yield from self._ask(partial(self.etcd.grant, lease, ttl, self.node), timeout)
        return lease

    def lease_keep_alive(self, lease: int, timeout: float | None = None) -> Steps[int]:
        """See `EtcdClient.lease_keep_alive`."""
        left = yield from self._ask(partial(self.etcd.keep_alive, lease), timeout)
        assert isinstance(left, int)
        return left

    def lease_revoke(self, lease: int, timeout: float | None = None) -> Steps[None]:
        """See `EtcdClient.lease_revoke`."""
        yield from self._ask(partial(self.etcd.revoke, lease, self.node), timeout)

    def watch(
        self,
        key: bytes,
        from_revision: int,
        on_events: Callable[[Sequence[WatchEvent]], None],
        on_lost: Callable[[WatchEnd], None],
        *,
        prefix: bool = True,
    ) -> SimWatch:
        """See `EtcdClient.watch`."""
        return SimWatch(self, key, from_revision, on_events, on_lost, prefix=prefix)

    # Inside

    def _ask(self, apply: Apply, timeout: float | None = None) -> Steps[object]:
        until = self.process.monotonic() + (_TIMEOUT if timeout is None else timeout)
        while True:
            answer = yield self._sending(apply, until)
            if answer is not _LOST and answer is not _UNSENT:
                self.etcd.unanswered.discard(self.node)
                return answer
            if self.process.monotonic() >= until - 1e-6:
                self.etcd.unanswered.add(self.node)
                raise EtcdUnreachable("etcd does not answer")

    def _sending(self, apply: Apply, until: float) -> Begin:
        """One sending: it arrives or not, and so does its answer."""
        etcd, world = self.etcd, self.etcd.world

        def begin(resume: Resume) -> None:
            left = until - self.process.monotonic()
            if not etcd.reaches(self.node):
                self.process.later(max(0.01, min(left, self.rng.uniform(0.3, 1.0))), resume, _UNSENT)
                return
            to, back = etcd.delay(self.rng), etcd.delay(self.rng)
            if to + back > left:
                self.process.later(max(0.01, left), resume, _LOST)
            world.after(to, arrive, resume, back)

        def arrive(resume: Resume, back: float) -> None:
            if not etcd.reaches(self.node):
                lose(resume)
                return
            try:
                answer = apply()
            except EtcdLeaseGone as error:
                answer = error
            if etcd.losing and self.rng.random() < 0.5:
                lose(resume)
            else:
                world.after(back, come_back, resume, answer)

        def come_back(resume: Resume, answer: object) -> None:
            if etcd.reaches(self.node):
                self.process.hears(resume, answer)
            else:
                lose(resume)

        def lose(resume: Resume) -> None:
            # Sometimes the connection breaks, and sometimes nothing comes at all.
            left = max(0.01, until - self.process.monotonic())
            self.process.later(self.rng.uniform(0.0, 0.3) if self.rng.random() < 0.5 else left, resume, _LOST)

        return lambda resume: begin(OneShot(resume))


class SimWatch:
    """See `rallypoint.control.etcd.client.EtcdWatch`."""

    def __init__(
        self,
        client: SimClient,
        key: bytes,
        from_revision: int,
        on_events: Callable[[Sequence[WatchEvent]], None],
        on_lost: Callable[[WatchEnd], None],
        *,
        prefix: bool,
    ) -> None:
        self.client = client
        self._etcd = client.etcd
        self._key = key
        self._prefix = prefix
        self._on_events = on_events
        self._on_lost = on_lost
        self._planned = False
        log = self._etcd.log
        self._told = len(log)
        while self._told and log[self._told - 1].kv.mod_revision >= from_revision:
            self._told -= 1
        self._etcd.watches.append(self)
        self.plan()

    def plan(self) -> None:
        """Something may have changed: tell it a little later."""
        log = self._etcd.log
        while not self._planned and self._told < len(log) and not self._is_meant(log[self._told].kv.key):
            self._told += 1
        if not self._planned and self._told < len(log):
            self._planned = True
            self._etcd.world.after(self._etcd.delay(self.client.rng), self.pump)

    def pump(self) -> None:
        """Tell what has changed, if the node can be reached."""
        self._planned = False
        if self not in self._etcd.watches or not self.client.process.alive or not self._etcd.reaches(self.client.node):
            return
        news = [each for each in self._etcd.log[self._told :] if self._is_meant(each.kv.key)]
        self._told = len(self._etcd.log)
        if news:
            self.client.process.hears(self._deliver, news)

    def drop(self) -> None:
        """It ends, and not because anybody wanted that."""
        if self in self._etcd.watches:
            self._etcd.watches.remove(self)
            self.client.process.hears(self._on_lost, WatchCancelled("the watch was ended"))

    def close(self) -> None:
        """Tell nothing more."""
        if self in self._etcd.watches:
            self._etcd.watches.remove(self)

    def _is_meant(self, key: bytes) -> bool:
        return key.startswith(self._key) if self._prefix else key == self._key

    def _deliver(self, news: Sequence[WatchEvent]) -> None:
        if self in self._etcd.watches:
            self._on_events(news)
