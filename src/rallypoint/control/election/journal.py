"""Writes the coordinator's state to etcd, so that one that is no longer the coordinator cannot write, and reads what
the previous one has left. Pure.

Laws of writing:

1. Each write is one transaction. It holds only while our own key exists, with the revision that it was created with
   (our lease is alive, so no other candidate was elected), and while the state is as we last wrote or read it.
2. A state that is too large for one transaction is written in parts, each behind the same fence, which count only when
   the state's own key names them.
3. There is one write at a time. Changes meanwhile are written together, so that the cost of a round does not grow with
   the number of nodes that join while etcd is writing. A state for which nobody waits is written `LATER`.
4. A write whose answer was lost is done if the state in etcd has our name and its number, and we are still the
   coordinator: a successor uses our name, and may have written the same. So the write is repeated unchanged.
5. While etcd is away, nothing is given up: it is retried for as long as we are not known to be deposed.

Law of a takeover: a coordinator continues with the state and the name of the previous one. Only if none of its nodes
has a key, and ours was not one of them, does its state belong to an earlier launch of the job, and this one begins with
nothing. But if a round ran then, no round is formed until its nodes, if they are alive after all, have had the time to
come back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeAlias

from rallypoint.control.election.keys import ElectionKeys, decode_snapshot, encode_snapshot, state_of
from rallypoint.control.election.steps import Fence, Takeover, Txn
from rallypoint.control.etcd.api import (
    Compare,
    Delete,
    EtcdError,
    EtcdLeaseGone,
    EtcdUnreachable,
    KeyValue,
    Operation,
    Put,
    Range,
    RangeResult,
    TxnResult,
)
from rallypoint.control.membership.state import Settings, State, known_to, recovery_timeout
from rallypoint.control.protocol.codec import decode_state, encode_state
from rallypoint.control.protocol.errors import RendezvousStateError

LATER = 1.0
"""Seconds that a state may wait for the next one, if nobody waits for it: etcd keeps each that is written."""


class Written(NamedTuple):
    """The state of that number is in etcd: nodes may be notified of what follows from it."""

    number: int


class NotYet(NamedTuple):
    """The same write has to be made again, a little later."""

    why: str


class CannotWrite(NamedTuple):
    """Writing is not possible any more."""

    why: str


class PartWritten(NamedTuple):
    """A part of it is in etcd: the next write has to be made."""


Outcome: TypeAlias = Written | PartWritten | NotYet | CannotWrite


class _Write(NamedTuple):
    """A write in progress: the coordinator's number of the state, the value, its parts, and how many are there."""

    number: int
    value: bytes
    parts: list[bytes]
    done: int = 0


class Journal:
    """The writes of one term."""

    def __init__(self, keys: ElectionKeys, fence: Fence, incarnation: str, takeover: Takeover) -> None:
        """Begin.

        Args:
            keys, fence, incarnation: of the job, of this agent's candidacy, and of the coordinator.
            takeover: the state as it is in etcd. It is attached to a lease, so that a job whose agents all die at once
                is removed some day.
        """
        self.fence = fence
        self._keys = keys
        self.incarnation = incarnation
        self._revision = takeover.revision
        self._written = takeover.number
        self._lease = takeover.lease
        self._newest: tuple[int, State] | None = None
        self._awaited = 0
        self._done = 0
        self._write: _Write | None = None

    def append(self, number: int, state: State, awaited: int) -> None:
        """See `dispatcher.JournalSink.append`."""
        self._awaited = max(self._awaited, awaited)
        if self._newest is None or number > self._newest[0]:
            self._newest = (number, state)

    def write_now(self) -> None:
        """Nothing may wait any more."""
        self._awaited = 0 if self._newest is None else self._newest[0]

    @property
    def is_idle(self) -> bool:
        """Whether all that was appended is written."""
        return self._newest is None or self._newest[0] <= self._done

    @property
    def is_awaited(self) -> bool:
        """Whether there is something to write that cannot wait."""
        return self._awaited > self._done

    @property
    def writing(self) -> int:
        """The number of the state that is being written; 0 if there is none."""
        return 0 if self._write is None else self._write.number

    def next_write(self) -> Txn | None:
        """The transaction to make now, whose result goes to `on_answer` or `on_error`; None where there is none.

        The same one is made until one of them has said that it is written (law 4).
        """
        if self._write is None:
            if self._newest is None or self.is_idle:
                return None
            number, state = self._newest
            encoded = encode_snapshot(self._keys, self.incarnation, self._written + 1, encode_state(state))
            self._write = _Write(number, *encoded)
        keys, write = self._keys, self._write
        unchanged = Compare(keys.state, "mod_revision", "==", self._revision)
        then: tuple[Operation, ...]
        if write.done < len(write.parts):
            then = (Put(keys.part(self._written + 1, write.done), write.parts[write.done], self._lease),)
        else:
            then = (Put(keys.state, write.value, self._lease), Delete(keys.parts(self._written), prefix=True))
        return Txn((self.fence.comparison(), unchanged), then, (Range(keys.state), Range(self.fence[0])))

    def on_answer(self, result: TxnResult) -> Outcome:
        """The transaction was answered."""
        assert self._write is not None, "no write is under way"
        if result.succeeded and self._write.done < len(self._write.parts):
            self._write = self._write._replace(done=self._write.done + 1)
            return PartWritten()
        if result.succeeded:
            return self._is_written(self._write, result.revision)
        stored, own = result.ranges
        return self._explain(self._write, stored, own)

    def on_error(self, error: EtcdError) -> Outcome:
        """The transaction was not answered, or refused."""
        if isinstance(error, EtcdUnreachable):
            return NotYet(str(error))
        return CannotWrite("the lease of the job's state has ended" if isinstance(error, EtcdLeaseGone) else str(error))

    def _is_written(self, write: _Write, revision: int) -> Written:
        self._revision = revision
        self._written += 1
        self._done = write.number
        self._write = None
        return Written(write.number)

    def _explain(self, write: _Write, stored: RangeResult, own: RangeResult) -> Outcome:
        """A comparison did not hold: because the write was made already (law 4), or because we are deposed."""
        elected = any(kv.create_revision == self.fence[1] for kv in own.kvs)
        if elected and stored.kvs:
            if stored.kvs[0].value == write.value:
                return self._is_written(write, stored.kvs[0].mod_revision)
            try:
                decode_snapshot(self._keys.state, stored.kvs[0].value)
            except RendezvousStateError as error:
                return CannotWrite(str(error))
        return CannotWrite("another agent is the coordinator now")


def takeover_from(
    stored: Sequence[KeyValue], nodes: Collection[int], met: str, keys: ElectionKeys, settings: Settings
) -> Takeover:
    """The state to start from.

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
    entry = stored[0]
    snapshot = decode_snapshot(keys.state, entry.value)
    try:
        state = decode_state(state_of(keys, snapshot, stored))
    except RendezvousStateError as error:
        raise RendezvousStateError(
            f"the key {keys.state.decode()!r} in etcd cannot be read: {error}; "
            "or delete it, if no job of that --rdzv-id runs"
        ) from None
    known = known_to(state)
    if snapshot.incarnation == met or any(node.number in nodes for node in known):
        return Takeover(snapshot.incarnation, state, snapshot.number, entry.mod_revision, entry.lease)
    # If they are alive after all, and only their leases have ended, they have the time to report.
    ran = state.verdict is None and bool(known)
    anew = State(restart_delay=recovery_timeout(settings) if ran else 0.0)
    return Takeover("", anew, snapshot.number, entry.mod_revision, entry.lease, forgets=True)
