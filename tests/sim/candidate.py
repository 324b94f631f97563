"""An agent's standing in etcd: what `rendezvous.etcd.candidate` does on a thread, in virtual time, in the same shape.

Where the arbiter is (`Posted`), what stands under the keys (`keys`) and what shows who is the arbiter (`Fence`) are the
production ones; `term` says what else is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from rallypoint.etcd.api import (
    Cancelled,
    Compare,
    Delete,
    EtcdError,
    EtcdLeaseGone,
    EtcdUnreachable,
    Found,
    KeyValue,
    Lost,
    Operation,
    Put,
    Range,
    WatchEvent,
)
from rallypoint.rendezvous.etcd.keys import Keys, decode_kept, decode_node, decode_post, encode_node
from rallypoint.rendezvous.etcd.memory import Fence
from rallypoint.rendezvous.etcd.posted import Posted
from rallypoint.rendezvous.etcd.term import STATE_TTL, Standing
from rallypoint.rendezvous.state import NodeId
from tests.sim.etcd import SimClient
from tests.sim.strand import Bell, Steps, Strand
from tests.sim.term import SimTerm

if TYPE_CHECKING:
    from tests.sim.job import Job
    from tests.sim.world import Process

T = TypeVar("T")

KEYS = Keys.of("/rallypoint", "sim")
_PAUSE, _LONG_PAUSE = 0.25, 4.0
_NEVER = 2**62
_LINGER = 2.0
_GOODBYE = 2.0


class _Before(NamedTuple):
    rival: KeyValue | None
    revision: int


class _Place(NamedTuple):
    lease: int
    fence: Fence
    before: _Before | None


class SimCandidate:
    """This agent in etcd, from its start to `close`."""

    def __init__(self, job: Job, process: Process, number: int, name: NodeId, posted: Posted) -> None:
        self.number = number
        self.place: _Place | None = None
        self.term: SimTerm | None = None
        self._job = job
        self._process = process
        self._name = name
        self._posted = posted
        self._ttl = max(1, math.ceil(job.settings.lease))
        self._news = Bell(process)
        self._closed = False
        self._told = 0
        self._deposed = ""
        self._ended: set[bytes] = set()
        self._post_watch_lost = True
        self._known_as: NodeId | None = None
        self._beat_at = self._state_beat_at = math.inf
        self._dead: frozenset[NodeId] = frozenset()
        self._finished: Callable[[], None] | None = None
        posted.on_news = self._tell
        assert job.etcd is not None
        self._client = SimClient(job.etcd, process, number, job.scenario.stream(f"etcd {number}"))
        self._strand = Strand(process, self._run())

    def close(self, finished: Callable[[], None]) -> None:
        """Give the arbiter's place to the next, and leave etcd; `finished` is called when that is done."""
        self._closed = True
        self._finished = finished
        self._news.ring()

    # The thread

    def _run(self) -> Steps[None]:
        client = self._client
        while not self._closed:
            yield from self._stand(client)
        yield from self._say_goodbye(client)
        if self._finished is not None:
            self._finished()

    def _stand(self, client: SimClient) -> Steps[None]:
        try:
            self.place = yield from self._patiently(client, lambda: self._register(client))
            yield from self._await_our_turn(client, self.place)
        except EtcdLeaseGone as error:
            self._process.world.note(self._process, "has lost its lease in etcd: %s", error)
            self._forget_place()
            yield from self._rest(client, _PAUSE)
        except EtcdUnreachable:
            pass

    def _forget_place(self) -> None:
        self.place = None
        self._beat_at = math.inf

    def _register(self, client: SimClient) -> Steps[_Place]:
        granted_at = self._process.clock()
        lease = yield from client.lease_grant(self._ttl)
        key = KEYS.node(lease)
        self._known_as = self._posted.name or self._name
        put = Put(key, encode_node(self._known_as), lease)
        youngest = Range(KEYS.nodes, prefix=True, limit=2, last_before=_NEVER)
        result = yield from client.txn([], [put, Range(key), youngest, Range(KEYS.arbiter)], repeatable=True)
        _, own, last, arbiter = result.responses
        assert isinstance(own, Found)
        assert isinstance(last, Found)
        assert isinstance(arbiter, Found)
        before = None
        if last.kvs[0].key == key:
            before = _Before(last.kvs[1] if len(last.kvs) > 1 else None, result.revision)
        self._see_post(arbiter.kvs, result.revision)
        if self._post_watch_lost:
            self._watch_post(client, result.revision)
        self._beat_at = granted_at + self._ttl / 3
        self._process.world.note(self._process, "stands in etcd as %s, lease %x", self._known_as, lease)
        return _Place(lease, Fence((key, own.kvs[0].create_revision)), before)

    def _await_our_turn(self, client: SimClient, place: _Place) -> Steps[None]:
        waited = False
        rival, revision = place.before or (yield from self._patiently(client, partial(self._before, client, place)))
        while not self._closed:
            if rival is None:
                yield from self._patiently(client, partial(self._serve, client, place, waited))
                return
            waited = True
            yield from self._await_end_of(client, rival, revision)
            rival, revision = yield from self._patiently(client, partial(self._before, client, place))

    def _before(self, client: SimClient, place: _Place) -> Steps[_Before]:
        older = Range(KEYS.nodes, prefix=True, last_before=place.fence[1])
        result = yield from client.txn([], [older], repeatable=True)
        (found,) = result.responses
        assert isinstance(found, Found)
        return _Before(next(iter(found.kvs), None), result.revision)

    def _await_end_of(self, client: SimClient, rival: KeyValue, revision: int) -> Steps[None]:
        def on_events(events: Sequence[WatchEvent]) -> None:
            if any(each.kind == "delete" for each in events):
                on_lost(None)

        def on_lost(lost: Lost | None) -> None:
            self._ended.add(rival.key)
            if not isinstance(lost, Cancelled):
                self._tell()

        self._ended.clear()
        watch = client.watch(rival.key, revision + 1, on_events, on_lost, prefix=False)
        try:
            while rival.key not in self._ended and not self._closed:
                if self._posted.refused == rival.lease:
                    yield from self._depose(client, rival)
                yield from self._wait()
                yield from self._do_chores(client)
        finally:
            watch.close()

    def _depose(self, client: SimClient, arbiter: KeyValue) -> Steps[None]:
        name = decode_node(arbiter.value)
        self._dead |= frozenset() if name is None else frozenset([name])
        self._process.world.note(self._process, "deposes %s", name)
        try:
            yield from client.lease_revoke(arbiter.lease)
        except EtcdError as error:
            self._process.world.note(self._process, "could not: %s", error)

    # Being the arbiter

    def _serve(self, client: SimClient, place: _Place, waited: bool) -> Steps[None]:
        self._deposed = ""
        standing = Standing(place.fence, place.lease, waited, self._posted.met, self._dead)
        term = SimTerm(self._job, self._process, self.number, client, KEYS, self._on_deposed)
        yield from term.begin(standing, self._name.addr)
        self.term = term
        self._dead = frozenset()
        self._state_beat_at = self._process.clock()
        failed = None
        try:
            while not self._deposed and not self._closed:
                yield from self._wait()
                yield from self._do_chores(client)
        except EtcdError as error:
            failed = error
        self.term = None
        self._state_beat_at = math.inf
        if not self._closed:
            yield from self._withdraw(client, place)
        yield from term.end(_LINGER if self._closed else 0.0)
        if failed is not None:
            raise failed
        if self._deposed:
            raise EtcdLeaseGone(self._deposed)

    def _withdraw(self, client: SimClient, place: _Place) -> Steps[None]:
        try:
            yield from client.lease_revoke(place.lease, _GOODBYE)
        except EtcdError as error:
            self._process.world.note(self._process, "could not end its own lease: %s", error)

    def _on_deposed(self, why: str) -> None:
        self._deposed = why
        self._tell()

    # Waiting, and what is due meanwhile

    def _tell(self) -> None:
        self._told += 1
        self._news.ring()

    def _wait(self, at_most: float = math.inf) -> Steps[None]:
        term_at = math.inf if self.term is None else self.term.wake_at
        seconds = min(at_most, min(self._beat_at, self._state_beat_at, term_at) - self._process.clock())
        if not self._told and not self._closed and seconds > 0:
            yield self._news.hear(seconds)
        self._told = 0

    def _patiently(self, client: SimClient, step: Callable[[], Steps[T]]) -> Steps[T]:
        pause = _PAUSE
        while True:
            try:
                return (yield from step())
            except EtcdUnreachable:
                if self._closed:
                    raise
                yield from self._rest(client, pause)
                pause = min(2 * pause, _LONG_PAUSE)

    def _rest(self, client: SimClient, seconds: float) -> Steps[None]:
        until = self._process.clock() + seconds * client.rng.uniform(0.5, 1.0)
        while not self._closed and (left := until - self._process.clock()) > 1e-6:
            yield from self._wait(left)
            yield from self._do_chores(client)

    def _do_chores(self, client: SimClient) -> Steps[None]:
        now = self._process.clock()
        if self.place is None or self._closed:
            return
        try:
            if now >= self._beat_at:
                self._beat_at = now + _PAUSE
                if (yield from client.lease_keep_alive(self.place.lease, self._ttl / 2)) == 0:
                    raise EtcdLeaseGone("it was not kept alive in time")
                self._beat_at = now + self._ttl / 3
            if self.term is not None and now >= self._state_beat_at:
                self._state_beat_at = now + STATE_TTL / 4
                yield from client.lease_keep_alive(self.term.state_lease)
            if self._posted.name is not None and self._posted.name != self._known_as:
                yield from self._rename(client, self.place, self._posted.name)
            if self._post_watch_lost:
                found = yield from client.range(KEYS.arbiter)
                self._see_post(found.kvs, found.revision)
                self._watch_post(client, found.revision)
        except EtcdUnreachable as error:
            self._process.world.note(self._process, "cannot reach etcd: %s", error)
        if self.term is not None:
            yield from self.term.ticks()

    def _rename(self, client: SimClient, place: _Place, name: NodeId) -> Steps[None]:
        put = Put(KEYS.node(place.lease), encode_node(name), place.lease)
        yield from client.txn([place.fence.holds()], [put], repeatable=True)
        self._known_as = name

    # Where the arbiter is

    def _watch_post(self, client: SimClient, revision: int) -> None:
        self._post_watch_lost = False
        client.watch(KEYS.arbiter, revision + 1, self._on_post, self._on_post_lost, prefix=False)

    def _on_post(self, events: Sequence[WatchEvent]) -> None:
        for each in events:
            if each.kind == "put":
                self._see_post([each.kv], each.kv.mod_revision)

    def _on_post_lost(self, lost: Lost) -> None:
        self._post_watch_lost = True
        if not isinstance(lost, Cancelled):
            self._tell()

    def _see_post(self, kvs: Sequence[KeyValue], revision: int) -> None:
        post = decode_post(kvs[0].value) if kvs else None
        if post is not None:
            self._posted.see(post, revision)

    # Leaving

    def _say_goodbye(self, client: SimClient) -> Steps[None]:
        place = self.place
        self._forget_place()
        if place is None and not (self._closed and self._posted.met):
            return
        try:
            last: list[Operation] = [] if place is None else [Delete(place.fence[0])]
            last += [Range(KEYS.nodes, prefix=True, limit=1), Range(KEYS.state)]
            result = yield from client.txn([], last, repeatable=True, timeout=_GOODBYE)
            *_, others, state = result.responses
            if self._closed and isinstance(others, Found) and isinstance(state, Found) and not others.kvs:
                yield from self._clear(client, state.kvs)
            if place is not None:
                yield from client.lease_revoke(place.lease, _GOODBYE)
        except EtcdError as error:
            self._process.world.note(self._process, "could not take leave of etcd: %s", error)

    def _clear(self, client: SimClient, state: Sequence[KeyValue]) -> Steps[None]:
        if not state or decode_kept(state[0].key, state[0].value).incarnation != self._posted.met:
            return
        unchanged = Compare(KEYS.state, "mod_revision", "==", state[0].mod_revision)
        gone = [Delete(KEYS.state), Delete(KEYS.store, prefix=True)]
        cleared = yield from client.txn([unchanged], gone, repeatable=True, timeout=_GOODBYE)
        if cleared.succeeded and state[0].lease:
            yield from client.lease_revoke(state[0].lease, _GOODBYE)
