"""What a newly elected coordinator starts from. Pure.

Laws:

1. What the coordinator before us knew is what we know; we go by its name. Only where none of its nodes has a key, and
   ours was not one of them, is what it left an earlier launch of the job, and this one begins with nothing. But if a
   round ran then, no round is formed until its nodes, should they live after all, have had the time to come back.
2. Of a node that is in the state, its session is the best evidence, then its key. One with a key is waited for; one
   without, for a moment: its lease may have ended because etcd was away. Where that was so for ourselves, all are
   waited for as long as the nodes of a lost control plane are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from rallypoint.coordinator.recovery import recovery_timeout
from rallypoint.election.keys import ElectionKeys, decode_node, decode_snapshot
from rallypoint.etcd.api import KeyValue, WatchEvent
from rallypoint.membership.state import NodeId, Settings, State, known_to
from rallypoint.protocol.errors import RendezvousStateError
from rallypoint.protocol.state_codec import decode_state

MIN_ABSENCE = 1.0
"""Seconds that a node without a key has at least, however short the lease is: a packet may have to be sent again."""


class Takeover(NamedTuple):
    """The state to go on from, and how it stands in etcd.

    `incarnation`: the name of the coordinator that we are now, "" for a new one. `number`, `revision` and `lease`: of
    the state in etcd, 0 where there is none. `forgets`: whether what stood there was an earlier launch's.
    """

    incarnation: str
    state: State
    number: int
    revision: int
    lease: int
    forgets: bool = False


def takeover_from(
    stored: Sequence[KeyValue], nodes: Collection[NodeId], met: str, keys: ElectionKeys, settings: Settings
) -> Takeover:
    """What to start from (law 1).

    Args:
        stored: what stands under the state's key.
        nodes: those that have a key.
        met: the coordinator that this node was last in a session with.
        keys, settings: of the job.

    Raises:
        RendezvousStateError: what is kept there is not ours to read.
    """
    if not stored:
        return Takeover("", State(), 0, 0, 0)
    (found,) = stored
    snapshot = decode_snapshot(keys.state, found.value)
    try:
        state = decode_state(snapshot.state)
    except RendezvousStateError as error:
        raise RendezvousStateError(
            f"the key {keys.state.decode()!r} in etcd cannot be read: {error}; "
            "or delete it, if no job of that --rdzv-id runs"
        ) from None
    known = known_to(state)
    if snapshot.incarnation == met or not set(known).isdisjoint(nodes):
        return Takeover(snapshot.incarnation, state, snapshot.number, found.mod_revision, found.lease)
    # Should they live after all, and only their leases have ended, they have the time to say so.
    ran = state.verdict is None and bool(known)
    anew = State(restart_delay=recovery_timeout(settings) if ran else 0.0)
    return Takeover("", anew, snapshot.number, found.mod_revision, found.lease, forgets=True)


def min_absence(settings: Settings) -> float:
    """Seconds for which a node is waited for that has no key."""
    return max(MIN_ABSENCE, settings.lease / 3)


def wait_for_missing(settings: Settings, *, waited: bool) -> float:
    """Seconds for which nodes are waited for that have no key when we are elected (law 2).

    `waited`: whether we were in etcd already when the last coordinator was.
    """
    return min_absence(settings) if waited else recovery_timeout(settings)


class Presence:
    """Which nodes have a key, and until when those without one are waited for."""

    def __init__(self, kvs: Iterable[KeyValue] = ()) -> None:
        self._names: dict[bytes, NodeId] = {}
        self._missing: dict[NodeId, float] = {}
        self._learn(kvs)

    @property
    def nodes(self) -> frozenset[NodeId]:
        """Those that have a key."""
        return frozenset(self._names.values())

    @property
    def wake_at(self) -> float:
        """When `overdue` may have something to say; infinity for never."""
        return min(self._missing.values(), default=float("inf"))

    def wait_for(self, nodes: Iterable[NodeId], until: float) -> None:
        """Wait for these until then, those without a key, unless they are waited for already."""
        for node in frozenset(nodes).difference(self._names.values()):
            self._missing.setdefault(node, until)

    def change(self, events: Iterable[WatchEvent], until: float) -> None:
        """Keys have changed; whose is gone, or names another node now, is waited for until then."""
        before = set[NodeId]()
        for event in events:
            if (name := self._names.pop(event.kv.key, None)) is not None:
                before.add(name)
            if event.kind == "put":
                self._learn([event.kv])
        if before:
            self.wait_for(before, until)

    def replace(self, kvs: Iterable[KeyValue], until: float) -> None:
        """These are all keys there are; whose is gone is waited for until then."""
        before, self._names = self.nodes, {}
        self._learn(kvs)
        self.wait_for(before, until)

    def overdue(self, now: float) -> frozenset[NodeId]:
        """Whose time is over and who has no key; each is named once."""
        over = {name for name, until in self._missing.items() if until <= now}
        for name in over:
            del self._missing[name]
        return frozenset(over.difference(self._names.values()) if over else ())

    def _learn(self, kvs: Iterable[KeyValue]) -> None:
        for each in kvs:
            name = decode_node(each.value)
            if name is not None:
                self._names[each.key] = name
