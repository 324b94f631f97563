"""Makes an agent a candidate, finds the next older one, and waits for that one to leave. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from rallypoint.base.endpoint import is_loopback
from rallypoint.election.context import StepContext
from rallypoint.election.keys import ElectionKeys, decode_node, encode_node
from rallypoint.election.steps import (
    DEBUG,
    WARNING,
    Addresses,
    Fence,
    FindAddresses,
    Grant,
    Procedure,
    Revoke,
    Watched,
    number_of,
    transact,
)
from rallypoint.etcd.api import EtcdError, KeyValue, Put, Range
from rallypoint.membership.state import NodeId

_NO_REVISION = 2**62
"""A revision that etcd will not have."""


class Predecessor(NamedTuple):
    """The next older candidate at that revision, if there was any."""

    kv: KeyValue | None
    revision: int


class Registration(NamedTuple):
    """A live key of ours: its lease, the fence that it makes, and the name that it holds."""

    lease: int
    fence: Fence
    name: NodeId


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


def register(keys: ElectionKeys, name: NodeId, ttl_s: int) -> Procedure[NewRegistration]:
    """Take a lease and hang a key on it."""
    lease = yield from number_of(Grant(ttl_s))
    key = keys.node(lease)
    put, youngest = (
        Put(key, encode_node(name), lease),
        Range(keys.nodes, prefix=True, limit=2, last_before=_NO_REVISION),
    )
    result = yield from transact((), (put, Range(key), youngest, Range(keys.leader)))
    own, last, leader = result.ranges
    predecessor = None
    if last.kvs[0].key == key:  # else it was sent before, unanswered, and others have come since
        predecessor = Predecessor(last.kvs[1] if len(last.kvs) > 1 else None, result.revision)
    place = Registration(lease, Fence((key, own.kvs[0].create_revision)), name)
    return NewRegistration(place, predecessor, leader.kvs, result.revision)


def next_older(keys: ElectionKeys, fence: Fence) -> Procedure[Predecessor]:
    """Find the candidate just before us."""
    result = yield from transact((), (Range(keys.nodes, prefix=True, last_before=fence[1]),))
    (older,) = result.ranges
    return Predecessor(next(iter(older.kvs), None), result.revision)


def rename(place: Registration, name: NodeId) -> Procedure[Registration]:
    """Write another name under our key, if it is still ours."""
    put = Put(place.fence[0], encode_node(name), place.lease)
    yield from transact((place.fence.comparison(),), (put,))
    return place._replace(name=name)


class PredecessorWait:
    """Waits until the next older candidate leaves, while there is one."""

    def __init__(self, context: StepContext) -> None:
        self.gone_at = math.inf
        """When that candidate was seen to be gone, or is to be looked for."""
        self.dead: frozenset[NodeId] = frozenset()
        """Coordinators that this node has found dead."""
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
        name = decode_node(predecessor.value)
        level = DEBUG if name in self.dead else WARNING
        text = "no process listens any more at the address of the coordinator %s; its lease is ended"
        self._context.log(level, text, name)
        self.dead |= frozenset() if name is None else frozenset([name])
        try:
            yield Revoke(predecessor.lease)
        except EtcdError as error:
            self._context.log(DEBUG, "its lease could not be ended: %s", error)
