"""The state that a newly elected coordinator starts from. Pure.

Laws:

1. We continue with the state and the name of the previous coordinator. Only if none of its nodes has a key, and ours
   was not one of them, does its state belong to an earlier launch of the job, and this one begins with nothing. But if
   a round ran then, no round is formed until its nodes, if they are alive after all, have had the time to come back.
2. Of a node that is in the state, its session is the best evidence, then its key. One with a key is waited for; one
   without, for a moment: its lease may have ended because etcd was away. If that has happened to ourselves, all are
   waited for as long as the nodes of a lost control plane are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from rallypoint.control.coordinator.recovery import recovery_timeout
from rallypoint.control.election.keys import ElectionKeys, decode_node, decode_snapshot
from rallypoint.control.etcd.api import KeyValue, WatchEvent
from rallypoint.control.membership.state import Settings, State, known_to
from rallypoint.control.protocol.codec import decode_state
from rallypoint.control.protocol.errors import RendezvousStateError

MIN_ABSENCE = 1.0
"""Seconds that a node without a key has at least, however short the lease is: a packet may have to be sent again."""


class Takeover(NamedTuple):
    """The state to continue with, and its version in etcd.

    `incarnation`: the coordinator's name that we now use, "" for a new one. `number`, `revision` and `lease`: of the
    state in etcd, 0 if there is none. `forgets`: whether that state was from an earlier launch.
    """

    incarnation: str
    state: State
    number: int
    revision: int
    lease: int
    forgets: bool = False


def takeover_from(
    stored: Sequence[KeyValue], nodes: Collection[int], met: str, keys: ElectionKeys, settings: Settings
) -> Takeover:
    """The state to start from (law 1).

    Args:
        stored: the value of the state's key.
        nodes: the numbers of the nodes that have a key.
        met: the coordinator that this node was last in a session with.
        keys, settings: of the job.

    Raises:
        RendezvousStateError: the stored state is not one that we can read.
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
    if snapshot.incarnation == met or any(each.number in nodes for each in known):
        return Takeover(snapshot.incarnation, state, snapshot.number, found.mod_revision, found.lease)
    # If they are alive after all, and only their leases have ended, they have the time to report.
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
    """The nodes that have a key, by their numbers, and until when those without one are waited for."""

    def __init__(self, kvs: Iterable[KeyValue] = ()) -> None:
        self._nodes: dict[bytes, int] = {}
        self._missing: dict[int, float] = {}
        self._learn(kvs)

    @property
    def nodes(self) -> frozenset[int]:
        """The nodes that have a key."""
        return frozenset(self._nodes.values())

    @property
    def wake_at(self) -> float:
        """The time at which `overdue` may have a result; infinity for never."""
        return min(self._missing.values(), default=float("inf"))

    def wait_for(self, nodes: Iterable[int], until: float) -> None:
        """Wait for these until then, those without a key, unless they are waited for already."""
        for node in frozenset(nodes).difference(self._nodes.values()):
            self._missing.setdefault(node, until)

    def change(self, events: Iterable[WatchEvent], until: float) -> None:
        """Keys have changed; whose is gone, or is of another node now, is waited for until then."""
        before = set[int]()
        for event in events:
            if (node := self._nodes.pop(event.kv.key, None)) is not None:
                before.add(node)
            if event.kind == "put":
                self._learn([event.kv])
        if before:
            self.wait_for(before, until)

    def replace(self, kvs: Iterable[KeyValue], until: float) -> None:
        """Replace the set of keys by these; nodes whose keys are gone are waited for until then."""
        before, self._nodes = self.nodes, {}
        self._learn(kvs)
        self.wait_for(before, until)

    def overdue(self, now: float) -> frozenset[int]:
        """Nodes without a key whose time is over; each is returned once."""
        over = {node for node, until in self._missing.items() if until <= now}
        for node in over:
            del self._missing[node]
        return frozenset(over.difference(self._nodes.values()) if over else ())

    def _learn(self, kvs: Iterable[KeyValue]) -> None:
        for each in kvs:
            if (node := decode_node(each.value)) is not None:
                self._nodes[each.key] = node.number
