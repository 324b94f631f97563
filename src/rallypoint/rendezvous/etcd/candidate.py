"""An agent's standing in etcd: its lease, its key, and its turn to be the arbiter.

One thread does all that waits for etcd: it keeps the lease alive, watches the one agent that is older than ours, and
serves a `term` when there is none. So the cost of an agent is constant, whatever the number of agents.

Laws:

1. The agent whose key is the oldest is the arbiter. A key lives as long as its agent's lease.
2. Each agent watches the one key before its own; when that goes, it looks again.
3. While etcd is away nothing is given up, here or elsewhere. A lease counts as ended when etcd says so; then the agent
   takes another, and is the youngest.
4. An arbiter whose machine refuses connections at its port is dead, though its lease lives on: the next in line ends
   that lease. Should it be wrong, it has deposed an arbiter that lives, which costs a new term, and the agent its place
   in the round. So who ceases to be the arbiter and lives ends its lease before its port refuses anybody.
5. Who goes last leaves nothing of the job in etcd. Who is only refused for a while does not go.
6. Whatever goes wrong here, the thread goes on: without it nobody would keep the lease, and nobody would know.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple, TypeVar

from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.endpoint import host_name, is_loopback
from rallypoint.base.errors import RallypointError
from rallypoint.base.log import get_logger
from rallypoint.etcd.api import (
    Cancelled,
    Compare,
    Delete,
    EtcdError,
    EtcdLeaseGone,
    EtcdRefused,
    EtcdUnreachable,
    Found,
    KeyValue,
    Lost,
    Operation,
    Put,
    Range,
    WatchEvent,
)
from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.telling import Watch
from rallypoint.rendezvous.errors import RendezvousStateError
from rallypoint.rendezvous.etcd.keys import Keys, decode_kept, decode_node, decode_post, encode_node
from rallypoint.rendezvous.etcd.memory import Fence
from rallypoint.rendezvous.etcd.posted import Posted
from rallypoint.rendezvous.etcd.term import STATE_TTL, Standing, Term
from rallypoint.rendezvous.state import NodeId, Settings

log = get_logger(__name__)

T = TypeVar("T")

_PAUSE, _LONG_PAUSE = 0.25, 4.0
"""Seconds until etcd is asked again that did not answer, at first and at most: a thousand agents may do the same."""
_LINGER = 2.0
"""Seconds that nodes have to read the last notices of an arbiter that goes."""
_GOODBYE = 2.0
"""Seconds for each of the last words to etcd."""
_TOLD_AGAIN = 300.0
"""Seconds until the log says again what is wrong with etcd, for weeks perhaps."""
_NEVER = 2**62
"""A revision that etcd will not have."""


class _Before(NamedTuple):
    """The agent that was the next older one at that revision, if there was any."""

    rival: KeyValue | None
    revision: int


class _Place(NamedTuple):
    """A key of ours that lives; and who was before it, if that was seen when it was made."""

    lease: int
    fence: Fence
    before: _Before | None


class Candidate:
    """This agent in etcd, from `start` to `close`."""

    def __init__(
        self,
        connect: Callable[[], EtcdClient],
        keys: Keys,
        settings: Settings,
        posted: Posted,
        find_addresses: Callable[[], Sequence[str]],
        listen: Callable[[Sequence[str]], list[socket.socket]],
        local_id: int,
    ) -> None:
        """Put the parts together.

        Args:
            connect: makes the client; called on the candidate's thread, since it costs imports.
            keys: of the job.
            settings: what the job asks of its rendezvous.
            posted: what this node knows of the arbiter, shared with its link.
            find_addresses: those of this machine as others may reach it, the likeliest first; may look up names.
            listen: makes sockets on which others reach us at these addresses, all on one port.
            local_id: which handler of this process this is.
        """
        self._connect = connect
        self._keys = keys
        self._settings = settings
        self._posted = posted
        self._find_addresses = find_addresses
        self._addresses: Sequence[str] = ()
        self._listen = listen
        self._local_id = local_id
        self._ttl = max(1, math.ceil(settings.lease))
        self._news = threading.Condition()
        self._closed = False
        self._told = 0
        """How often something has happened that the thread should look at."""
        self._deposed = ""
        self._ended: set[bytes] = set()
        """Keys that we have watched and that are gone."""
        self._post_watch: Watch | None = None
        self._post_watch_lost = True
        self._warned_of: tuple[type[Exception], float] | None = None
        """What the log was last told to be wrong, and when."""
        self._known_as: NodeId | None = None
        """What stands under our key."""
        self._beat_at = self._state_beat_at = math.inf
        self._place: _Place | None = None
        self._term: Term | None = None
        self._dead: frozenset[NodeId] = frozenset()
        posted.on_news = self._tell
        self._thread = threading.Thread(target=self._run, name="rallypoint-etcd", daemon=True)

    def start(self) -> None:
        """Begin to stand; returns at once."""
        self._thread.start()

    @property
    def serves(self) -> bool:
        """Whether this agent is the arbiter."""
        return self._term is not None

    def close(self) -> None:
        """Give the arbiter's place to the next, and leave etcd; waits until that is done. Idempotent."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    # The thread

    def _run(self) -> None:
        try:
            client = self._connect()
        except RallypointError as error:
            self._posted.despair(str(error))
            return
        except Exception as error:
            log.exception("no client of etcd can be made")
            self._posted.despair(f"no client of etcd can be made ({type(error).__name__}: {error})")
            return
        with closing(client):
            while not self._closed:
                try:
                    self._stand(client)
                except Exception as error:  # law 6
                    self._warn(error, "this agent's place in etcd is given up for a moment, for a reason not foreseen")
                    self._posted.trouble = f"{type(error).__name__}: {error}"
                    with contextlib.suppress(Exception):
                        self._say_goodbye(client)
                    self._rest(client, _LONG_PAUSE)
            self._say_goodbye(client)

    def _stand(self, client: EtcdClient) -> None:
        """One lease, from its grant to its end."""
        try:
            self._place = self._patiently(client, lambda: self._register(client))
            self._posted.despair("")
            self._await_our_turn(client, self._place)
        except EtcdLeaseGone as error:
            if self._place is not None:
                log.warning("this agent's place in etcd is lost (%s); it takes another", error)
            self._forget_place()
            self._rest(client, _PAUSE)
        except EtcdUnreachable as error:  # only where we are to close
            self._posted.trouble = str(error)
        except (EtcdError, RendezvousStateError) as error:
            self._warn(error, "etcd cannot be used as it is")
            self._posted.despair(str(error))
            self._say_goodbye(client)
            self._rest(client, _LONG_PAUSE)

    def _warn(self, error: Exception, what: str) -> None:
        """Tell the log, once in a while."""
        now = SYSTEM_CLOCK.monotonic()
        news = self._warned_of is None or self._warned_of[0] is not type(error)
        if news or (self._warned_of is not None and now >= self._warned_of[1] + _TOLD_AGAIN):
            self._warned_of = type(error), now
            foreseen = isinstance(error, RallypointError)
            log.warning("%s: %s", what, error, exc_info=None if foreseen else error)
        else:
            log.debug("%s: %s", what, error)

    def _forget_place(self) -> None:
        self._place = None
        self._beat_at = math.inf

    def _register(self, client: EtcdClient) -> _Place:
        if not self._addresses or is_loopback(self._addresses[0]):  # etcd's name may not have been known yet
            self._addresses = self._find_addresses()
        granted_at, seen = SYSTEM_CLOCK.monotonic(), self._posted.revision
        lease = client.lease_grant(self._ttl)
        key = self._keys.node(lease)
        self._known_as = self._posted.name or NodeId(self._addresses[0], os.getpid(), self._local_id, host_name())
        put = Put(key, encode_node(self._known_as), lease)
        youngest = Range(self._keys.nodes, prefix=True, limit=2, last_before=_NEVER)
        result = client.txn([], [put, Range(key), youngest, Range(self._keys.arbiter)], repeatable=True)
        _, own, last, arbiter = result.responses
        assert isinstance(own, Found)
        assert isinstance(last, Found)
        assert isinstance(arbiter, Found)
        before = None
        if last.kvs[0].key == key:  # else it was sent before, unanswered, and others have come since
            before = _Before(last.kvs[1] if len(last.kvs) > 1 else None, result.revision)
        if result.revision < seen:
            log.warning(
                "etcd has gone back from revision %d to %d and what it held is lost; this agent begins anew there",
                seen,
                result.revision,
            )
            self._posted.begin_anew()
            self._post_watch_lost = True
        self._see_post(arbiter.kvs, result.revision)
        if self._post_watch_lost:
            self._watch_post(client, result.revision)
        self._beat_at = granted_at + self._ttl / 3
        return _Place(lease, Fence((key, own.kvs[0].create_revision)), before)

    def _await_our_turn(self, client: EtcdClient, place: _Place) -> None:
        waited = False
        rival, revision = place.before or self._patiently(client, partial(self._before, client, place))
        while not self._closed:
            if rival is None:
                self._patiently(client, partial(self._serve, client, place, waited))
                return
            waited = True
            self._await_end_of(client, rival, revision)
            rival, revision = self._patiently(client, partial(self._before, client, place))

    def _before(self, client: EtcdClient, place: _Place) -> _Before:
        older = Range(self._keys.nodes, prefix=True, last_before=place.fence[1])
        result = client.txn([], [older], repeatable=True)
        (found,) = result.responses
        assert isinstance(found, Found)
        return _Before(next(iter(found.kvs), None), result.revision)

    def _await_end_of(self, client: EtcdClient, rival: KeyValue, revision: int) -> None:
        def on_events(events: Sequence[WatchEvent]) -> None:
            if any(each.kind == "delete" for each in events):
                on_lost(None)

        def on_lost(lost: Lost | None) -> None:
            self._ended.add(rival.key)
            if not isinstance(lost, Cancelled):  # what etcd will not have is not begun again at once, but with a beat
                self._tell()

        self._ended.clear()
        watch = client.watch(rival.key, revision + 1, on_events, on_lost, prefix=False)
        try:
            while rival.key not in self._ended and not self._closed:
                if self._posted.refused == rival.lease:
                    self._depose(client, rival)
                self._wait()
                self._do_chores(client)
        finally:
            watch.close()

    def _depose(self, client: EtcdClient, arbiter: KeyValue) -> None:
        """Law 4."""
        name = decode_node(arbiter.value)
        level = logging.DEBUG if name in self._dead else logging.WARNING
        log.log(level, "nobody listens any more where the arbiter %s was; its lease is ended", name)
        self._dead |= frozenset() if name is None else frozenset([name])
        try:
            client.lease_revoke(arbiter.lease)
        except EtcdError as error:
            log.debug("it could not be ended: %s", error)

    # Being the arbiter

    def _serve(self, client: EtcdClient, place: _Place, waited: bool) -> None:
        self._deposed = ""
        standing = Standing(place.fence, place.lease, waited, self._posted.met, self._dead)
        term = Term(
            client,
            self._keys,
            self._settings,
            standing,
            addresses=self._addresses,
            listen=self._listen,
            deposed=self._on_deposed,
            tls=self._posted.tls,
        )
        self._term = term
        self._dead = frozenset()  # it knows; who comes back by that name lives
        self._state_beat_at = SYSTEM_CLOCK.monotonic()  # nobody knows how long ago the last one saw to it
        try:
            while not self._deposed and not self._closed:
                self._wait()
                self._do_chores(client)
        finally:
            self._term = None
            self._state_beat_at = math.inf
            if not self._closed:
                self._withdraw(client, place)
            term.close(_LINGER if self._closed else 0.0)
        if self._deposed:
            raise EtcdLeaseGone(self._deposed)

    def _withdraw(self, client: EtcdClient, place: _Place) -> None:
        """Law 4: we live, and are the arbiter no more."""
        try:
            client.lease_revoke(place.lease, timeout_s=_GOODBYE)
        except EtcdError as error:
            log.debug("its own lease could not be ended: %s", error)

    def _on_deposed(self, why: str) -> None:
        self._deposed = why
        self._tell()

    # Waiting, and what is due meanwhile

    def _tell(self) -> None:
        with self._news:
            self._told += 1
            self._news.notify_all()

    def _wait(self, at_most: float = math.inf) -> None:
        """Sleep until something has happened, or is due, or so many seconds are over."""
        term_at = math.inf if self._term is None else self._term.wake_at
        seconds = min(at_most, min(self._beat_at, self._state_beat_at, term_at) - SYSTEM_CLOCK.monotonic())
        with self._news:
            if not self._told and not self._closed and seconds > 0:
                self._news.wait(None if seconds == math.inf else seconds)
            self._told = 0

    def _patiently(self, client: EtcdClient, step: Callable[[], T]) -> T:
        """Law 3: take a step as soon as etcd lets us."""
        pause = _PAUSE
        while True:
            try:
                return step()
            except EtcdUnreachable as error:
                self._posted.trouble = str(error)
                if self._closed:
                    raise
                self._rest(client, pause)
                pause = min(2 * pause, _LONG_PAUSE)

    def _rest(self, client: EtcdClient, seconds: float) -> None:
        """Do nothing but what is due, for about so many seconds."""
        until = SYSTEM_CLOCK.monotonic() + seconds * random.uniform(0.5, 1.0)
        while not self._closed and (left := until - SYSTEM_CLOCK.monotonic()) > 0:
            self._wait(left)
            self._do_chores(client)

    def _do_chores(self, client: EtcdClient) -> None:
        """What is due: beats, our name, where the arbiter is, and the term's own."""
        now = SYSTEM_CLOCK.monotonic()
        if self._place is None or self._closed:
            return
        try:
            if now >= self._beat_at:
                self._beat_at = now + _PAUSE
                self._beat(client, self._place.lease)
                self._beat_at = now + self._ttl / 3
            if self._term is not None and now >= self._state_beat_at:
                self._state_beat_at = now + STATE_TTL / 4
                client.lease_keep_alive(self._term.state_lease)
            if self._posted.name is not None and self._posted.name != self._known_as:
                self._rename(client, self._place, self._posted.name)
            if self._post_watch_lost:
                found = client.range(self._keys.arbiter)
                self._see_post(found.kvs, found.revision)
                self._watch_post(client, found.revision)
        except EtcdUnreachable as error:
            self._posted.trouble = str(error)
        else:
            self._posted.trouble = ""
        if self._term is not None:
            self._term.tick()

    def _beat(self, client: EtcdClient, lease: int) -> None:
        if client.lease_keep_alive(lease, timeout_s=self._ttl / 2) == 0:
            raise EtcdLeaseGone("its lease was not kept alive in time")

    def _rename(self, client: EtcdClient, place: _Place, name: NodeId) -> None:
        put = Put(self._keys.node(place.lease), encode_node(name), place.lease)
        client.txn([place.fence.holds()], [put], repeatable=True)
        self._known_as = name

    # Where the arbiter is

    def _watch_post(self, client: EtcdClient, revision: int) -> None:
        if self._post_watch is not None:
            self._post_watch.close()
        self._post_watch_lost = False
        self._post_watch = client.watch(
            self._keys.arbiter, revision + 1, self._on_post, self._on_post_lost, prefix=False
        )

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

    def _say_goodbye(self, client: EtcdClient) -> None:
        """Law 5, which holds for those, too, whose lease has ended just before."""
        place = self._place
        self._forget_place()
        try:
            if self._closed and (place is not None or self._posted.met):
                self._leave_nothing(client, place)
            if place is not None:
                client.lease_revoke(place.lease, timeout_s=_GOODBYE)
        except EtcdError as error:
            log.info("etcd could not be told that this agent goes, and will find out by itself: %s", error)

    def _leave_nothing(self, client: EtcdClient, place: _Place | None) -> None:
        """If we are the last, take away what the job has kept."""
        last: list[Operation] = [] if place is None else [Delete(place.fence[0])]
        last += [Range(self._keys.nodes, prefix=True, limit=1), Range(self._keys.state)]
        try:
            *_, others, state = client.txn([], last, repeatable=True, timeout_s=_GOODBYE).responses
            if isinstance(others, Found) and isinstance(state, Found) and not others.kvs:
                self._clear(client, state.kvs)
        except EtcdRefused as error:  # etcd may refuse to write, and end leases all the same
            log.info("what the job has kept in etcd stays there until its lease ends: %s", error)

    def _clear(self, client: EtcdClient, state: Sequence[KeyValue]) -> None:
        """Take away what the job has kept, if it is the one that we were in."""
        try:
            ours = bool(state) and decode_kept(state[0].key, state[0].value).incarnation == self._posted.met
        except RendezvousStateError:
            ours = False
        if not ours:
            return
        unchanged = Compare(self._keys.state, "mod_revision", "==", state[0].mod_revision)
        gone = [Delete(self._keys.state), Delete(self._keys.store, prefix=True)]
        cleared = client.txn([unchanged], gone, repeatable=True, timeout_s=_GOODBYE)
        if cleared.succeeded and state[0].lease:
            client.lease_revoke(state[0].lease, timeout_s=_GOODBYE)
