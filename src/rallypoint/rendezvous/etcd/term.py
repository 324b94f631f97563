"""One agent's time as the arbiter: takes over what the one before has kept, serves the nodes, and lets go again.

Laws:

1. What the arbiter before us knew is what we know; we go by its name. Only where none of its nodes has a key, and ours
   was not one of them, is what it left an earlier launch of the job, and this one begins with nothing. But if a round
   ran then, no round is formed until its nodes, should they live after all, have had the time to come back.
2. Of a node that is in the state, its session is the best witness, then its key. One with a key is waited for; one
   without, for a moment: its lease may have ended because etcd was away. Where that was so for ourselves, all are
   waited for as long as the nodes of a lost control plane are.
3. A node that is known to be dead is waited for by nobody.
4. From the moment on that we let go, nothing that happens is known to us: it is the next arbiter's to find out.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.descriptors import allow_nodes
from rallypoint.base.endpoint import host_name
from rallypoint.base.log import get_logger
from rallypoint.etcd.api import EtcdLeaseGone, EtcdUnreachable, Found, KeyValue, Lost, Put, Range, WatchEvent
from rallypoint.etcd.client import EtcdClient
from rallypoint.rendezvous.errors import RendezvousStateError
from rallypoint.rendezvous.etcd.keys import Kept, Keys, Post, decode_kept, decode_node, encode_post
from rallypoint.rendezvous.etcd.memory import EtcdMemory, Fence
from rallypoint.rendezvous.hub import Former, Hub
from rallypoint.rendezvous.recovery import patience
from rallypoint.rendezvous.server import ControlServer
from rallypoint.rendezvous.state import NodeId, Settings, State, known_to
from rallypoint.rendezvous.state_codec import decode_state

if TYPE_CHECKING:
    import socket

    from rallypoint.base.tls import Tls

log = get_logger(__name__)

STATE_TTL = 600
"""Seconds for which the state outlives the last arbiter that kept it alive."""
MOMENT = 1.0
"""Seconds that a node without a key has at least, however short the lease is: a packet may have to be sent again."""
_NO_LEASE = "its lease in etcd has ended"
_LAST_WRITES = 1.0
"""Seconds that the last writes of an arbiter may take."""


class Standing(NamedTuple):
    """Who is elected, and what it knows of the time before.

    `fence` shows that it is, `lease` is its own; `waited` tells whether it was in etcd already when the last arbiter
    was; `met` is the arbiter that this node was last in a session with, `dead` are nodes whose death is certain.
    """

    fence: Fence
    lease: int
    waited: bool
    met: str
    dead: frozenset[NodeId]


class Term:
    """The arbiter, while it is here."""

    _clock: Clock = SYSTEM_CLOCK
    _watch_lost = False

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        settings: Settings,
        standing: Standing,
        *,
        addresses: Sequence[str],
        listen: Callable[[Sequence[str]], list[socket.socket]],
        deposed: Callable[[str], None],
        tls: Tls | None = None,
    ) -> None:
        """Take over, and tell all where we listen.

        Args:
            client: to speak to etcd with.
            keys: of the job.
            settings: what the job asks of its rendezvous.
            standing: who we are.
            addresses: of this machine, the likeliest first.
            listen: makes sockets on which others reach us at these addresses, all on one port.
            deposed: called once, from any thread, with the reason, when we are the arbiter no more.
            tls: of the control plane, if it has any.

        Raises:
            EtcdError: etcd could not be read or written; `EtcdLeaseGone` if we are not the arbiter any more.
            RendezvousStateError: what is kept there is not ours to read.
        """
        self._client = client
        self._keys = keys
        self._nodes: dict[bytes, NodeId] = {}
        self._moment = max(MOMENT, settings.lease / 3)
        self._missing: dict[NodeId, float] = {}
        read = client.txn([standing.fence.holds()], [Range(keys.state), Range(keys.nodes, prefix=True)])
        if not read.succeeded:
            raise EtcdLeaseGone("its lease has ended")
        stored, nodes = (each.kvs if isinstance(each, Found) else () for each in read.responses)
        self._learn(nodes)
        kept = decode_kept(keys.state, stored[0].value) if stored else None
        former = Former("", State()) if kept is None else self._former(kept, standing, settings)
        self.state_lease = stored[0].lease if stored and stored[0].lease else client.lease_grant(STATE_TTL)
        incarnation = former.incarnation or secrets.token_hex(8)
        self.hub = Hub(settings, former=former._replace(incarnation=incarnation), memory=self)
        self._memory = EtcdMemory(
            client,
            keys,
            standing.fence,
            incarnation,
            revision=stored[0].mod_revision if stored else 0,
            number=0 if kept is None else kept.number,
            lease=self.state_lease,
            kept=self.hub.kept,
            deposed=deposed,
        )
        allow_nodes(settings.max_nodes)
        secret = secrets.token_hex(16)
        try:
            self._server = ControlServer(self.hub, listen(addresses), keys=lambda _job: (secret.encode(),), tls=tls)
        except BaseException:
            self._memory.close()
            raise
        try:
            self._miss(settings, standing)
            post = Post(tuple(addresses), self._server.port, standing.lease, secret)
            told = client.txn(
                [standing.fence.holds()], [Put(keys.arbiter, encode_post(post), standing.lease)], repeatable=True
            )
            if not told.succeeded:
                raise EtcdLeaseGone("its lease has ended")
            self._watch = client.watch(keys.nodes, read.revision + 1, self._on_nodes, self._on_lost)
        except BaseException:
            self._end(0.0)
            raise
        log.info("this agent is the arbiter of job %r, on port %d", settings.run_id, self._server.port)

    def keep(self, number: int, state: State) -> None:
        """See `hub.Memory.keep`."""
        self._memory.keep(number, state)

    @property
    def wake_at(self) -> float:
        """When `tick` has something to do, on the monotonic clock."""
        return min(list(self._missing.values()), default=math.inf)

    def tick(self) -> None:
        """Time has passed: who has had no key for long enough, and no session, is lost."""
        if self._watch_lost:
            self._read_again()
        now = self._clock.monotonic()
        over = {name for name, until in list(self._missing.items()) if until <= now}
        for name in over:
            del self._missing[name]
        if over:
            self.hub.lost(over.difference(self._nodes.values()), _NO_LEASE)

    def close(self, linger: float) -> None:
        """Be the arbiter no more; nodes have `linger` seconds to read what they were told and hang up."""
        self._watch.close()
        self._end(linger)

    def _end(self, linger: float) -> None:
        # Nodes hang up when the server ends, and that must not be taken for their departure.
        self._memory.close(_LAST_WRITES if linger else 0.0)
        self._server.close(linger, f"{host_name()} hosts it no more")

    def _former(self, kept: Kept, standing: Standing, settings: Settings) -> Former:
        """Law 1. An arbiter without a name is a new one."""
        try:
            state = decode_state(kept.state)
        except RendezvousStateError as error:
            raise RendezvousStateError(
                f"the key {self._keys.state.decode()!r} in etcd cannot be read: {error}; "
                "or delete it, if no job of that --rdzv-id runs"
            ) from None
        if kept.incarnation == standing.met or not set(known_to(state)).isdisjoint(self._nodes.values()):
            return Former(kept.incarnation, state)
        log.info("what etcd holds of this job is an earlier launch's, of which no node lives; it begins anew")
        # Should they live after all, and only their leases have ended, they have the time to say so.
        ran = state.verdict is None and bool(known_to(state))
        return Former("", State(hold=patience(settings) if ran else 0.0))

    def _miss(self, settings: Settings, standing: Standing) -> None:
        """Whom we do not find in etcd."""
        self.hub.lost(standing.dead.difference(self._nodes.values()), "its machine refuses connections")
        self._await(
            set(known_to(self.hub.state)).difference(self._nodes.values()),
            self._moment if standing.waited else patience(settings),
        )

    def _await(self, nodes: Iterable[NodeId], seconds: float) -> None:
        """Law 2."""
        until = self._clock.monotonic() + seconds
        for node in nodes:
            self._missing.setdefault(node, until)

    # Keys of nodes

    def _learn(self, kvs: Sequence[KeyValue]) -> None:
        for each in kvs:
            name = decode_node(each.value)
            if name is not None:
                self._nodes[each.key] = name

    def _on_nodes(self, events: Sequence[WatchEvent]) -> None:
        gone: set[NodeId] = set()
        for event in events:
            if event.kind == "put":
                self._learn([event.kv])
            else:
                gone.update(name for name in [self._nodes.pop(event.kv.key, None)] if name is not None)
        self._await(gone.difference(self._nodes.values()), self._moment)

    def _on_lost(self, lost: Lost) -> None:
        log.info("the watch over the nodes in etcd has ended (%s); they are read again", lost)
        self._watch_lost = True

    def _read_again(self) -> None:
        """What the watch would have told; and watch on."""
        try:
            found = self._client.range(self._keys.nodes, prefix=True)
        except EtcdUnreachable:
            return  # with the next tick
        self._watch_lost = False
        before, self._nodes = set(self._nodes.values()), {}
        self._learn(found.kvs)
        self._watch = self._client.watch(self._keys.nodes, found.revision + 1, self._on_nodes, self._on_lost)
        self._await(before.difference(self._nodes.values()), self._moment)
