"""Where the arbiter was last posted to be, for the link that looks for it. A `Whereabouts`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from rallypoint.base.endpoint import Endpoint
from rallypoint.rendezvous.etcd.keys import Post
from rallypoint.rendezvous.handshake import HandshakeError
from rallypoint.rendezvous.hub import do_nothing
from rallypoint.rendezvous.state import NodeId
from rallypoint.rendezvous.whereabouts import Place

if TYPE_CHECKING:
    from rallypoint.base.tls import Tls


class Posted:
    """Written by the candidate's threads, read by the link's."""

    lasting = False

    def __init__(self, where: str, tls: Tls | None = None) -> None:
        """Nobody is posted yet.

        Args:
            where: the endpoints of etcd, as a person knows them.
            tls: of the control plane, if it has any.
        """
        self.tls = tls
        self._where = where
        self._lock = threading.Lock()
        self._post: Post | None = None
        self._revision = 0
        self._turn = 0
        self._refusing: set[str] = set()
        """Addresses of the arbiter's at which the last attempt was refused."""
        self._refused: Post | None = None
        self.name: NodeId | None = None
        """What this node goes by, once it was greeted."""
        self.met = ""
        """The arbiter of the last session, by its incarnation."""
        self.trouble = ""
        """Why etcd cannot be asked at the moment."""
        self.hopeless = ""
        """Why it cannot be asked at all until somebody changes something."""
        self.on_move: Callable[[], None] = do_nothing
        """Called, from any thread, when the arbiter is elsewhere, or will never be found."""
        self.on_news: Callable[[], None] = do_nothing
        """Called, from any thread, when the link has told something."""

    def __str__(self) -> str:
        return f"etcd ({self._where})"

    # What the candidate says and asks

    def see(self, post: Post | None, revision: int) -> None:
        """The arbiter is there, as of this revision of etcd; None for nowhere."""
        with self._lock:
            if revision <= self._revision:
                return
            moved = post is not None and post != self._post
            self._post, self._revision = post, revision
            if moved:
                self._turn = 0
                self._refusing.clear()
        if moved:
            self.on_move()

    @property
    def revision(self) -> int:
        """The latest revision of etcd's of which anything was seen here."""
        return self._revision

    def begin_anew(self) -> None:
        """What was seen so far is of an etcd that is no more."""
        with self._lock:
            self._revision = 0

    def despair(self, sentence: str) -> None:
        """Say why nobody will be found until somebody changes something; an empty sentence takes that back."""
        changed = sentence != self.hopeless
        self.hopeless = sentence
        if changed and sentence:
            self.on_move()

    @property
    def refused(self) -> int:
        """The lease of the arbiter at whose port nobody listens, though its machine is there; 0 if there is none."""
        with self._lock:
            return self._refused.lease if self._refused is not None and self._refused == self._post else 0

    # What the link asks and says

    @property
    def advice(self) -> str:
        """What to do if nobody is found."""
        return "check --rdzv-endpoint, and that etcd is healthy (etcdctl endpoint status)"

    def resolved(self, addresses: list[str]) -> None:
        """Who is elected says so in etcd."""

    def find(self) -> Place | None:
        """Where the arbiter listens. See `Whereabouts.find`."""
        with self._lock:
            if self._post is None and self.hopeless:
                raise HandshakeError(self.hopeless)
            if self._post is None:
                return None
            address = self._post.addresses[self._turn % len(self._post.addresses)]
            return Place(Endpoint(address, self._post.port), self._post.secret.encode(), self.tls)

    def why_not(self) -> str:
        """Why nobody knows."""
        if self.hopeless or self.trouble:
            return self.hopeless or self.trouble
        return "no agent was elected arbiter yet" if self._revision else "etcd has not answered yet"

    def greeted(self, node: NodeId, incarnation: str) -> None:
        """A session is open, in which this node is called so, with the arbiter of that name."""
        self.met = incarnation
        with self._lock:
            self._refusing.clear()
        if node != self.name:
            self.name = node
            self.on_news()

    def failed(self, place: Place, error: Exception) -> None:
        """No session could be opened there: the next attempt is made at the arbiter's next address.

        Only an arbiter that refuses at all its addresses is one whose port is shut: one of them may be loopback, and
        then it is our own machine that refuses.
        """
        with self._lock:
            if self._post is None or self._post.secret.encode() != place.key:
                return
            self._turn += 1
            change = self._refusing.add if isinstance(error, ConnectionRefusedError) else self._refusing.discard
            change(place.endpoint.host)
            refused = self._refusing.issuperset(self._post.addresses)
            if refused:
                self._refused = self._post
        if refused:
            self.on_news()
