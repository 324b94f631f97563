"""The arbiter's state on its way into etcd: whoever is no longer the arbiter can write nothing.

Laws:

1. Each write is one transaction. It holds only while our own key exists, with the revision that it was created with
   (our lease lives, so nobody else was elected), and while the state is as we last wrote or read it.
2. One write at a time is under way. What changes meanwhile is written together, so that the cost of a round does not
   grow with the number of those who join while etcd thinks.
3. A write whose answer was lost is done if the state in etcd bears our name and its number, and we are still the
   arbiter: the next one goes by our name, and may have written the very same.
4. While etcd is away, nothing is given up: it is tried again for as long as we are not known to be deposed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rallypoint.base.log import get_logger
from rallypoint.etcd.api import Compare, EtcdLeaseGone, EtcdRefused, EtcdUnreachable, Found, Put, Range
from rallypoint.etcd.client import EtcdClient
from rallypoint.rendezvous.errors import RendezvousStateError
from rallypoint.rendezvous.etcd.keys import Kept, Keys, decode_kept, encode_kept
from rallypoint.rendezvous.state import State
from rallypoint.rendezvous.state_codec import encode_state

log = get_logger(__name__)

_PAUSE = 0.2
"""Seconds until a write that could not be made is tried again."""


class Fence(tuple[bytes, int]):
    """Our own key, and the revision that it was created with."""

    def holds(self) -> Compare:
        """That we are still who we were when we were elected."""
        key, created = self
        return Compare(key, "create_revision", "==", created)


class EtcdMemory:
    """Writes the newest state, on a thread of its own. A `hub.Memory`."""

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        fence: Fence,
        incarnation: str,
        *,
        revision: int,
        number: int,
        lease: int,
        kept: Callable[[int], None],
        deposed: Callable[[str], None],
    ) -> None:
        """Begin.

        Args:
            client: to write with.
            keys: of the job.
            fence: what shows that we are the arbiter.
            incarnation: the name that the arbiter goes by.
            revision: of the state in etcd as we have read it; 0 if there was none.
            number: the number of that state.
            lease: that the state hangs on, so that a job whose agents all die at once is forgotten one day.
            kept: called with the hub's number of a state that is written.
            deposed: called once with the reason, when we can write no more.
        """
        self._client = client
        self._keys = keys
        self._fence = fence
        self._incarnation = incarnation
        self._revision = revision
        self._written = number
        self._lease = lease
        self._kept = kept
        self._deposed = deposed
        self._changed = threading.Condition()
        self._newest: tuple[int, State] | None = None
        self._done = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="rallypoint-etcd-memory", daemon=True)
        self._thread.start()

    def keep(self, number: int, state: State) -> None:
        """See `hub.Memory.keep`."""
        with self._changed:
            if self._newest is None or number > self._newest[0]:
                self._newest = (number, state)
                self._changed.notify_all()

    def close(self, linger: float = 0.0) -> None:
        """Write no more; what is under way may take `linger` seconds. Idempotent."""
        with self._changed:
            self._changed.wait_for(self._is_idle, timeout=linger)
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _is_idle(self) -> bool:
        return self._closed or self._newest is None or self._newest[0] <= self._done

    def _run(self) -> None:
        try:
            self._write_all()
        except Exception as error:  # else we would seem to be the arbiter, and nobody would be told anything any more
            log.exception("the arbiter's state cannot be kept")
            self._deposed(f"its state cannot be kept ({type(error).__name__}: {error})")

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self._is_idle())
                if self._closed or self._newest is None:
                    return
                number, state = self._newest
            if not self._write(state):
                return
            with self._changed:
                self._done = number
                self._changed.notify_all()
            self._kept(number)

    def _write(self, state: State) -> bool:
        """Write until it is done; returns False when that can never be."""
        kept = Kept(self._incarnation, self._written + 1, encode_state(state))
        value = encode_kept(kept)
        while not self._closed:
            why = self._try_to_write(kept, value)
            if why == "":
                self._written = kept.number
                return True
            if why is not None:
                self._deposed(why)
                return False
            with self._changed:
                self._changed.wait_for(lambda: self._closed, timeout=_PAUSE)
        return False

    def _try_to_write(self, kept: Kept, value: bytes) -> str | None:
        """One attempt: "" for done, None for not yet, and else why it cannot be."""
        unchanged = Compare(self._keys.state, "mod_revision", "==", self._revision)
        try:
            result = self._client.txn(
                [self._fence.holds(), unchanged],
                [Put(self._keys.state, value, self._lease)],
                [Range(self._keys.state), Range(self._fence[0])],
                repeatable=True,
            )
        except EtcdUnreachable as error:
            log.debug("the arbiter's state cannot be written yet: %s", error)
            return None
        except EtcdLeaseGone:
            return "the lease of the job's state has ended"
        except EtcdRefused as error:
            return str(error)
        if result.succeeded:
            self._revision = result.revision
            return ""
        return self._look_why(kept, *result.responses)

    def _look_why(self, kept: Kept, found: object, own: object) -> str:
        """A comparison did not hold: because the write was made already (law 3), or because we are deposed."""
        elected = isinstance(own, Found) and any(each.create_revision == self._fence[1] for each in own.kvs)
        if elected and isinstance(found, Found) and found.kvs:
            stored = found.kvs[0]
            try:
                there = decode_kept(self._keys.state, stored.value)
            except RendezvousStateError as error:
                return str(error)
            if (there.incarnation, there.number, there.state) == kept:
                self._revision = stored.mod_revision
                return ""
        return "another agent is the arbiter now"
