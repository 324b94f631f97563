"""One agent's time as the arbiter: what `rendezvous.etcd.term` and `memory` do on threads, in virtual time.

What the term decides (whose state it is, who is lost) is `Term`'s, what a write that failed means `EtcdMemory`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rallypoint.etcd.api import Compare, EtcdError, EtcdLeaseGone, EtcdUnreachable, Found, Lost, Put, Range
from rallypoint.rendezvous.etcd.keys import Kept, Keys, Post, decode_kept, encode_kept, encode_post
from rallypoint.rendezvous.etcd.memory import EtcdMemory, Fence
from rallypoint.rendezvous.etcd.term import MOMENT, STATE_TTL, Standing, Term
from rallypoint.rendezvous.hub import Former
from rallypoint.rendezvous.state import NodeId, State
from rallypoint.rendezvous.state_codec import encode_state
from tests.sim.etcd import SimClient, SimWatch
from tests.sim.server import ProcessClock, Server
from tests.sim.strand import Bell, Steps, Strand
from tests.sim.world import Process

if TYPE_CHECKING:
    from tests.sim.job import Job

_PAUSE = 0.2
_LAST_WRITES = 1.0


class SimTerm(Term):
    """The production term, but for all that waits: `begin` and `end`."""

    def __init__(
        self,
        job: Job,
        process: Process,
        number: int,
        client: SimClient,
        keys: Keys,
        deposed: Callable[[str], None],
    ) -> None:
        self._job = job
        self._process = process
        self._number = number
        self._sim_client = client
        self._keys = keys
        self._on_deposed = deposed
        self._clock = ProcessClock(process)
        self._nodes: dict[bytes, NodeId] = {}
        self._moment = max(MOMENT, job.settings.lease / 3)
        self._missing: dict[NodeId, float] = {}
        self._sim_watch: SimWatch | None = None

    def begin(self, standing: Standing, address: str) -> Steps[None]:
        """Take over, and tell all where we listen. See `Term.__init__`."""
        client, keys = self._sim_client, self._keys
        read = yield from client.txn([standing.fence.holds()], [Range(keys.state), Range(keys.nodes, prefix=True)])
        if not read.succeeded:
            raise EtcdLeaseGone("this agent's lease in etcd has ended")
        stored, nodes = (each.kvs if isinstance(each, Found) else () for each in read.responses)
        self._learn(nodes)
        kept = decode_kept(keys.state, stored[0].value) if stored else None
        former = Former("", State()) if kept is None else self._former(kept, standing, self._job.settings)
        self.state_lease = stored[0].lease if stored and stored[0].lease else (yield from client.lease_grant(STATE_TTL))
        former = former._replace(incarnation=former.incarnation or self._job.new_incarnation())
        self._memory_here = memory = SimMemory(
            self._job,
            self._process,
            client,
            keys,
            standing.fence,
            former.incarnation,
            revision=stored[0].mod_revision if stored else 0,
            number=0 if kept is None else kept.number,
            lease=self.state_lease,
            deposed=self._on_deposed,
        )
        secret = f"{client.rng.getrandbits(64):x}"
        self.server = self._job.new_term(self._process, self._number, former, memory, secret.encode())
        self.hub = self.server.hub
        memory.server = self.server
        try:
            self._miss(self._job.settings, standing)
            post = Post((address,), self.server.port, standing.lease, secret)
            told = yield from client.txn(
                [standing.fence.holds()], [Put(keys.arbiter, encode_post(post), standing.lease)], repeatable=True
            )
            if not told.succeeded:
                raise EtcdLeaseGone("this agent's lease in etcd has ended")
            self._sim_watch = client.watch(keys.nodes, read.revision + 1, self._on_nodes, self._on_lost)
        except EtcdError:
            yield from self.end(0.0)
            raise
        self._process.world.note(self._process, "is the arbiter %s", former.incarnation)

    def ticks(self) -> Steps[None]:
        """See `Term.tick`."""
        if self._watch_lost:
            yield from self._read_nodes_again()
        lost, self._watch_lost = self._watch_lost, False
        self.tick()
        self._watch_lost = lost

    def _read_nodes_again(self) -> Steps[None]:
        client, keys = self._sim_client, self._keys
        try:
            read = yield from client.txn([], [Range(keys.nodes, prefix=True)])
        except EtcdUnreachable:
            return
        (found,) = read.responses
        assert isinstance(found, Found)
        self._watch_lost = False
        before, self._nodes = set(self._nodes.values()), {}
        self._learn(found.kvs)
        self._sim_watch = client.watch(keys.nodes, found.revision + 1, self._on_nodes, self._on_lost)
        self.hub.lost(before.difference(self._nodes.values()))

    def _on_lost(self, lost: Lost) -> None:
        self._watch_lost = True

    def end(self, linger: float) -> Steps[None]:
        """Be the arbiter no more. See `Term.close`."""
        if self._sim_watch is not None:
            self._sim_watch.close()
        yield from self._memory_here.end(_LAST_WRITES if linger else 0.0)
        over = Bell(self._process)
        self.server.finish(over.ring, linger)
        while not self.server.finished:
            yield over.hear()


class SimMemory(EtcdMemory):
    """The production memory, but for all that waits."""

    def __init__(
        self,
        job: Job,
        process: Process,
        client: SimClient,
        keys: Keys,
        fence: Fence,
        incarnation: str,
        *,
        revision: int,
        number: int,
        lease: int,
        deposed: Callable[[str], None],
    ) -> None:
        self.server: Server
        self._job = job
        self._process = process
        self._sim_client = client
        self._keys = keys
        self._fence = self.fence = fence
        self._incarnation = incarnation
        self._revision = revision
        self._written = number
        self._lease = lease
        self._deposed = deposed
        self._bell = Bell(process)
        self._newest: tuple[int, State] | None = None
        self._done = 0
        self._closed = False
        self._strand = Strand(process, self._writes())

    def keep(self, number: int, state: State) -> None:
        """See `hub.Memory.keep`."""
        if self._newest is None or number > self._newest[0]:
            self._newest = (number, state)
            self._bell.ring()

    def end(self, linger: float) -> Steps[None]:
        """See `EtcdMemory.close`."""
        until = self._process.clock() + linger
        while not self._is_idle() and self._process.clock() < until:
            yield self._bell.hear(until - self._process.clock())
        self._closed = True
        self._bell.ring()
        while self._strand.running:
            yield self._bell.hear(0.05)

    def _writes(self) -> Steps[None]:
        while True:
            while self._is_idle() and not self._closed:
                yield self._bell.hear()
            if self._closed or self._newest is None:
                return
            number, state = self._newest
            if not (yield from self._write_until_done(number, state)):
                return
            self._done = number
            self._bell.ring()
            self.server.hub.kept(number)

    def _write_until_done(self, number: int, state: State) -> Steps[bool]:
        kept = Kept(self._incarnation, self._written + 1, encode_state(state))
        value = encode_kept(kept)
        while not self._closed:
            why = yield from self._attempt(number, kept, value)
            if why == "":
                self._written = kept.number
                return True
            if why is not None:
                self._deposed(why)
                return False
            yield self._bell.hear(_PAUSE)
        return False

    def _attempt(self, number: int, kept: Kept, value: bytes) -> Steps[str | None]:
        unchanged = Compare(self._keys.state, "mod_revision", "==", self._revision)
        try:
            result = yield from self._sim_client.txn(
                [self._fence.holds(), unchanged],
                [Put(self._keys.state, value, self._lease)],
                [Range(self._keys.state), Range(self._fence[0])],
                repeatable=True,
                done=lambda: self._job.audit.kept(self.server, number, self._fence),
            )
        except EtcdUnreachable:
            return None
        except EtcdLeaseGone:
            return "the lease of the job's state has ended"
        if result.succeeded:
            self._revision = result.revision
            return ""
        return self._look_why(kept, *result.responses)
