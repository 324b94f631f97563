"""The state that a newly elected coordinator starts from. Pure.

Laws:

1. We continue with the state and the name of the previous coordinator. Only if none of its nodes has a key, and ours
   was not one of them, does its state belong to an earlier launch of the job, and this one begins with nothing. But if
   a round ran then, no round is formed until its nodes, if they are alive after all, have had the time to come back.
2. Of a node that is in the state, its session is the best evidence. One that we have seen lose its key shortly before
   is awaited for a moment only: its lease may have ended because etcd was away. All others, most of which have never
   had a key, are awaited as long as the nodes of a lost control plane are (`Coordinator.restore`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from rallypoint.control.coordinator.recovery import recovery_timeout
from rallypoint.control.election.keys import ElectionKeys, decode_node, decode_snapshot, state_of
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
        stored: the values under the state's key and those of its parts, by name.
        nodes: the numbers of the nodes that have a key.
        met: the coordinator that this node was last in a session with.
        keys, settings: of the job.

    Raises:
        RendezvousStateError: the stored state is not one that we can read.
    """
    if not stored or stored[0].key != keys.state:  # there may be parts of a state that was never complete
        return Takeover("", State(), 0, 0, 0)
    found = stored[0]
    snapshot = decode_snapshot(keys.state, found.value)
    try:
        state = decode_state(state_of(keys, snapshot, stored))
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
    """Seconds for which a node is awaited that has lost its key."""
    return max(MIN_ABSENCE, settings.lease / 3)


class Presence:
    """The candidates' keys as we have seen them since we have one; and the nodes that have lost theirs meanwhile, by
    their numbers, with the time until which each is awaited.
    """

    def __init__(self, kvs: Iterable[KeyValue] = ()) -> None:
        self._keys = {each.key: each for each in kvs}
        self._absent: dict[int, float] = {}

    @property
    def nodes(self) -> frozenset[int]:
        """The nodes that have a key."""
        return frozenset(node.number for each in self._keys.values() if (node := decode_node(each.value)) is not None)

    @property
    def wake_at(self) -> float:
        """The time at which `overdue` may have a result; infinity for never."""
        return min(self._absent.values(), default=float("inf"))

    def last_before(self, revision: int) -> KeyValue | None:
        """The youngest of the keys that were created before that revision."""
        older = (each for each in self._keys.values() if each.create_revision < revision)
        return max(older, key=lambda each: each.create_revision, default=None)

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
        before, self._keys = self.nodes, {each.key: each for each in kvs}
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
