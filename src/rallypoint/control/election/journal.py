"""Writes the coordinator's state to etcd in a way that a deposed coordinator cannot, and reads a predecessor's state.
Pure.

Laws of writing:

1. Each write is one transaction. It succeeds only while our own key exists with its original revision (our lease is
   alive, so no other candidate was elected), and while the state is as we last wrote or read it.
2. A state that is too large for one transaction is written in parts, each with the same fence. The parts count only
   once the state's own key names them.
3. Only one write is in progress at a time. Changes during a write are written together, so a round's cost does not grow
   with the number of nodes that join while etcd writes. A state that nobody waits for is written `LATER`.
4. A write whose answer was lost succeeded if the state in etcd contains our name and the write's number, and we are
   still the coordinator: a successor uses our name, and might have written the same. So the write is repeated
   unchanged.
5. While etcd is unreachable, writes are retried until we know that we are deposed.

Law of a takeover: a coordinator continues with the state and the name of the previous one. If none of that state's
nodes has a key, and our node is not among them, the state belongs to an earlier launch of the job, and this launch
starts empty. But if a round ran then, no round is formed until its nodes, if still alive, had time to return.
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
"""Seconds that a state may wait for the next one, if nobody waits for it: etcd stores every written state."""


class Written(NamedTuple):
    """The state with that number is in etcd: send its notifications."""

    number: int


class NotYet(NamedTuple):
    """Repeat the same write a little later."""

    why: str


class CannotWrite(NamedTuple):
    """Writing is no longer possible."""

    why: str


class PartWritten(NamedTuple):
    """A part of the state is in etcd: make the next write."""


Outcome: TypeAlias = Written | PartWritten | NotYet | CannotWrite


class _Write(NamedTuple):
    """A write in progress: the coordinator's number for the state, the value, its parts, and how many parts are
    written."""

    number: int
    value: bytes
    parts: list[bytes]
    done: int = 0


class Journal:
    """The writes of one term."""

    def __init__(self, keys: ElectionKeys, fence: Fence, incarnation: str, takeover: Takeover) -> None:
        """Start a term's journal.

        Args:
            keys, fence, incarnation: the job's, this agent's candidacy's, and the coordinator's.
            takeover: the state in etcd. Its lease ensures that a job whose agents all die at once is removed some day.
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
        """Write everything without delay."""
        self._awaited = 0 if self._newest is None else self._newest[0]

    @property
    def is_idle(self) -> bool:
        """Whether everything appended is written."""
        return self._newest is None or self._newest[0] <= self._done

    @property
    def is_awaited(self) -> bool:
        """Whether an urgent state must be written."""
        return self._awaited > self._done

    @property
    def writing(self) -> int:
        """Number of the state that is being written; 0 for none."""
        return 0 if self._write is None else self._write.number

    def next_write(self) -> Txn | None:
        """The next transaction; pass its result to `on_answer` or `on_error`. None if there is none.

        Repeats a transaction until it is known to be written (law 4).
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
        """Handle the transaction's answer."""
        assert self._write is not None, "no write is under way"
        if result.succeeded and self._write.done < len(self._write.parts):
            self._write = self._write._replace(done=self._write.done + 1)
            return PartWritten()
        if result.succeeded:
            return self._is_written(self._write, result.revision)
        stored, own = result.ranges
        return self._explain(self._write, stored, own)

    def on_error(self, error: EtcdError) -> Outcome:
        """Handle a transaction that got no answer, or was refused."""
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
        """Explain a failed comparison: the write was already made (law 4), or we are deposed."""
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
    """Choose the state to start from.

    Args:
        stored: the values of the state's key and its parts' keys, by name.
        nodes: the numbers of the nodes with a key.
        met: the coordinator of this node's last session.
        keys, settings: those of the job.

    Raises:
        RendezvousStateError: the stored state is unreadable.
    """
    if not stored or stored[0].key != keys.state:  # parts of an incomplete state might exist
        return Takeover("", State(), 0, 0, 0)
    entry = stored[0]
    snapshot = decode_snapshot(keys.state, entry.value)
    try:
        state = decode_state(state_of(keys, snapshot, stored))
    except RendezvousStateError as error:
        raise RendezvousStateError(
            f"the key {keys.state.decode()!r} in etcd cannot be read: {error}; or delete the key if no job with that "
            "--rdzv-id is running"
        ) from None
    known = known_to(state)
    if snapshot.incarnation == met or any(node.number in nodes for node in known):
        return Takeover(snapshot.incarnation, state, snapshot.number, entry.mod_revision, entry.lease)
    # If they are still alive and only their leases ended, give them time to report.
    ran = state.verdict is None and bool(known)
    anew = State(restart_delay=recovery_timeout(settings) if ran else 0.0)
    return Takeover("", anew, snapshot.number, entry.mod_revision, entry.lease, forgets=True)
