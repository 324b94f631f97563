"""Stores the last announced place of the elected coordinator, for the link."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rallypoint.base.endpoint import Endpoint
from rallypoint.control.client.dialing import DialTarget, EndpointResolver
from rallypoint.control.coordinator.dispatcher import do_nothing
from rallypoint.control.election.keys import LeaderRecord, decode_leader
from rallypoint.control.protocol.handshake import HandshakeError

if TYPE_CHECKING:
    from rallypoint.base.tls import ControlTls
    from rallypoint.control.etcd.api import KeyValue


class LeaderResolver(EndpointResolver):
    """Written by the election's threads, read by the link's thread."""

    def __init__(self, where: str, tls: ControlTls | None = None) -> None:
        """Start without a known coordinator.

        Args:
            where: the endpoints of etcd, for messages.
            tls: the TLS of the control plane, if any.
        """
        self.tls = tls
        self._where = where
        self._lock = threading.Lock()
        self._record: LeaderRecord | None = None
        self._revision = 0
        self._turn = 0
        self._refusing: set[str] = set()
        """The coordinator's addresses that refused the last attempt."""
        self._refused: LeaderRecord | None = None
        self.met = ""
        """Incarnation of the coordinator in the last session."""
        self.lost = False
        """Whether the last attempt to open a session failed."""
        self.trouble = ""
        """Why etcd is currently unavailable."""
        self.permanent_error = ""
        """Why etcd is unusable until a user changes something."""
        self.on_move: Callable[[], None] = do_nothing
        """Called on any thread when the coordinator moves, or will never be found."""
        self.on_news: Callable[[], None] = do_nothing
        """Called on any thread when the link has news."""

    def __str__(self) -> str:
        return f"etcd ({self._where})"

    # For the election

    def learn(self, kvs: Sequence[KeyValue], revision: int) -> None:
        """Read the value of the leader's key at this revision of etcd; ignore a foreign value."""
        record = decode_leader(kvs[0].value) if kvs else None
        if record is not None:
            self.update(record, revision)

    def update(self, record: LeaderRecord | None, revision: int) -> None:
        """Set the coordinator's place as of this revision of etcd; None for none."""
        with self._lock:
            if revision <= self._revision:
                return
            moved = record is not None and record != self._record
            self._record, self._revision = record, revision
            if moved:
                self._turn = 0
                self._refusing.clear()
        if moved:
            self.on_move()

    def reset_revision(self) -> None:
        """Forget all revisions so far: they belong to an etcd that no longer exists."""
        with self._lock:
            self._revision = 0

    def set_permanent_error(self, sentence: str) -> None:
        """Set why no coordinator will be found until a user changes something; an empty sentence withdraws this."""
        changed = sentence != self.permanent_error
        self.permanent_error = sentence
        if changed and sentence:
            self.on_move()

    @property
    def refusing_lease(self) -> int:
        """Lease of a coordinator whose machine is reachable but whose port has no listener; 0 for none."""
        with self._lock:
            return self._refused.lease if self._refused is not None and self._refused == self._record else 0

    # For the link

    @property
    def advice(self) -> str:
        return "check --rdzv-endpoint, and that etcd is healthy (etcdctl endpoint status)"

    def resolve(self) -> DialTarget | None:
        """Where the coordinator listens. See `EndpointResolver.resolve`."""
        with self._lock:
            if self._record is None and self.permanent_error:
                raise HandshakeError(self.permanent_error)
            if self._record is None:
                return None
            address = self._record.addresses[self._turn % len(self._record.addresses)]
            return DialTarget(Endpoint(address, self._record.port), self._record.secret.encode(), self.tls)

    def unresolved_reason(self) -> str:
        if self.permanent_error or self.trouble:
            return self.permanent_error or self.trouble
        return "no agent has been elected coordinator yet" if self._revision else "etcd has not answered yet"

    def session_opened(self, incarnation: str) -> None:
        with self._lock:
            self._refusing.clear()
            self._refused = None
        if incarnation != self.met or self.lost:
            self.met, self.lost = incarnation, False
            self.on_news()

    def on_failure(self, target: DialTarget, error: Exception) -> None:
        """Use the coordinator's next address for the next attempt, since no session could be opened there.

        A coordinator's port counts as closed only if all its addresses refuse: one of them might be loopback, and then
        our own machine refuses.
        """
        with self._lock:
            if self._record is None or self._record.secret.encode() != target.key:
                return
            self._turn += 1
            change = self._refusing.add if isinstance(error, ConnectionRefusedError) else self._refusing.discard
            change(target.endpoint.host)
            refused = self._refusing.issuperset(self._record.addresses)
            if refused:
                self._refused = self._record
        if refused or not self.lost:
            self.lost = True
            self.on_news()
