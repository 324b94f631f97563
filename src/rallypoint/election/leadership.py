"""An elected candidate's terms as the coordinator: their beginning, duties and end. Pure.

Laws:

1. The address is published only when the server listens and no other agent is coordinator: our key still exists.
2. A node that is known to be dead is not waited for; one without a key for a while, and then it is lost.
3. An agent that stops coordinating and is alive ends its lease before its port refuses connections: other agents take
   one whose port refuses for dead.
4. From the moment that we step down, we know nothing about further events: the next coordinator has to find them out.
"""

from __future__ import annotations

import math

from rallypoint.election.candidacy import Registration
from rallypoint.election.context import StepContext
from rallypoint.election.keys import ElectionKeys, LeaderRecord, encode_leader
from rallypoint.election.resign import TIMEOUT
from rallypoint.election.steps import (
    DEBUG,
    INFO,
    EndTerm,
    Grant,
    KeepLeaseAlive,
    Listening,
    NodesLost,
    Procedure,
    Revoke,
    StartTerm,
    Watched,
    number_of,
    transact,
)
from rallypoint.election.takeover import Presence, min_absence, takeover_from, wait_for_missing
from rallypoint.etcd.api import EtcdError, EtcdLeaseGone, Put, Range, TxnResult, WatchEvent
from rallypoint.membership.state import NodeId, Settings, known_to

CLOSE_LINGER = 2.0
"""Seconds that nodes have to read the last notifications of a coordinator that leaves."""
STATE_TTL = 600
"""Seconds for which the state outlives the last coordinator that kept it alive."""


class Leadership:
    """This agent's terms, one after another."""

    def __init__(self, keys: ElectionKeys, settings: Settings, context: StepContext) -> None:
        """No term is on."""
        self.term = 0
        """The number of the term that is on; 0 for none."""
        self.deposed = ""
        """Why this term has to end."""
        self._keys = keys
        self._settings = settings
        self._context = context
        self._terms = 0
        self._state_lease = 0
        self._presence = Presence()

    @property
    def wake_at(self) -> float:
        """When `lose_overdue` has something to do."""
        return self._presence.wake_at if self.term else math.inf

    def take_over(
        self, place: Registration, addresses: tuple[str, ...], met: str, dead: frozenset[NodeId], *, waited: bool
    ) -> Procedure[None]:
        """Read what the previous coordinator has left, serve, and publish the address.

        Args:
            place: the place of this agent.
            addresses: the addresses of this machine.
            met: the coordinator that this node was last in a session with.
            dead: nodes whose death is certain.
            waited: whether it was a candidate already when there was a coordinator.

        Raises:
            EtcdLeaseGone: another candidate was elected meanwhile. After any error, there is no term.
        """
        keys, fence = self._keys, place.fence
        read = yield from transact((fence.comparison(),), (Range(keys.state), Range(keys.nodes, prefix=True)))
        if not read.succeeded:
            raise EtcdLeaseGone("its lease has ended")
        stored, nodes = read.ranges
        presence = Presence(nodes.kvs)
        takeover = takeover_from(stored.kvs, presence.nodes, met, keys, self._settings)
        if takeover.forgets:
            text = "etcd holds the data of an earlier launch of this job, of which no node is alive; it is not used"
            self._context.log(INFO, text)
        if not takeover.lease:
            takeover = takeover._replace(lease=(yield from number_of(Grant(STATE_TTL))))
        self._terms += 1
        self.term, self.deposed, self._presence, self._state_lease = self._terms, "", presence, takeover.lease
        try:
            listening = yield StartTerm(self.term, fence, addresses, takeover)
            assert isinstance(listening, Listening)
            self._lose(dead - presence.nodes, "its machine refuses connections")
            seconds = wait_for_missing(self._settings, waited=waited)
            presence.wait_for(known_to(takeover.state), self._context.now + seconds)
            yield from self._announce(place, listening)
        except Exception:
            self.term = 0
            yield EndTerm(0.0)
            raise
        self._watch(read)
        self._context.log(
            INFO, "this agent is the coordinator of job %r, on port %d", self._settings.run_id, listening.port
        )

    def _announce(self, place: Registration, listening: Listening) -> Procedure[None]:
        record = LeaderRecord(listening.addresses, listening.port, place.lease, listening.secret)
        put = Put(self._keys.leader, encode_leader(record), place.lease)
        if not (yield from transact((place.fence.comparison(),), (put,))).succeeded:
            raise EtcdLeaseGone("its lease has ended")

    def step_down(self, lease: int, *, lives: bool) -> Procedure[None]:
        """Stop coordinating; `lives` tells whether this agent goes on, as a candidate (law 3)."""
        self.term = 0
        if lives:
            try:
                yield Revoke(lease, TIMEOUT)
            except EtcdError as error:
                self._context.log(DEBUG, "its own lease could not be ended: %s", error)
        self._context.unwatch(Watched.NODES)
        yield EndTerm(0.0 if lives else CLOSE_LINGER)

    def keep_state_alive(self) -> Procedure[None]:
        """Keep the lease alive that the state hangs on."""
        yield from number_of(KeepLeaseAlive(self._state_lease))

    # Who is lost

    def changed(self, events: tuple[WatchEvent, ...]) -> None:
        """Keys of nodes have changed."""
        self._presence.change(events, self._context.now + min_absence(self._settings))

    def find_nodes(self) -> Procedure[None]:
        """Read what a watch that has ended would have reported, and watch on."""
        read = yield from transact((), (Range(self._keys.nodes, prefix=True),))
        self._presence.replace(read.ranges[0].kvs, self._context.now + min_absence(self._settings))
        self._watch(read)

    def lose_overdue(self) -> None:
        """Treat nodes whose time is over as lost (law 2)."""
        self._lose(self._presence.overdue(self._context.now), "its lease in etcd has ended")

    def _lose(self, nodes: frozenset[NodeId], detail: str) -> None:
        if nodes:
            self._context.add(NodesLost(nodes, detail))

    def _watch(self, read: TxnResult) -> None:
        self._context.watch(Watched.NODES, self._keys.nodes, read.revision, prefix=True)
