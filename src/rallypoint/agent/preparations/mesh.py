"""The mesh of `--preflight`: before the first workers of a node start, its agent dials the other nodes of the round.

Laws:

1. It is done in the job's first round only, which all nodes know by its number: a later node would dial nodes that have
   done it. If that round ends early, it is not done.
2. Every node listens before another can know its address, and does so until all have dialled, or its round is over.
3. All nodes get the same result (`preflight.mesh`), over the round's worker store. If it is required that all are
   reached, group rank 0 announces the failure, and the others wait for the verdict.
4. The loop never waits: it greets nodes that dial, and a separate thread dials and uses the store.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from rallypoint.agent.preparations.background import Background
from rallypoint.agent.preparations.mesh_attempt import MESH, MeshAttempt
from rallypoint.agent.preparations.peer_exchange import FIRST_ROUNDS, exchange_of, round_scope, store_opener
from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.endpoint import Endpoint, is_loopback, own_address
from rallypoint.base.errors import UserError
from rallypoint.base.log import get_logger
from rallypoint.preflight.dialing import MeshListener
from rallypoint.preflight.mesh import MeshNode, concerned, dialled_ranks
from rallypoint.preflight.results import REQUIRE

if TYPE_CHECKING:
    from rallypoint.agent.controller import WorkerController
    from rallypoint.agent.preparations.peer_exchange import PeerUser
    from rallypoint.agent.preparations.peer_record import PeerRecord
    from rallypoint.agent.spec import WorkerGroup
    from rallypoint.protocol.messages import Placement

log = get_logger(__name__)

_VERDICT = 30.0
"""Seconds that a node waits for the job's verdict before it announces the failure itself."""


def add_mesh(workers: WorkerController, mode: str, nodes: int) -> None:
    """Make an agent that has not run yet dial the others before its first workers start.

    Args:
        workers: of the agent.
        mode: `WARN` or `REQUIRE`.
        nodes: the maximal number of nodes of the job.

    Raises:
        UserError: it is required, and the rounds have no store before their workers run.
    """
    try:
        exchange = exchange_of(workers, nodes, "--preflight")
    except UserError as error:
        if mode == REQUIRE:
            raise
        log.warning("the nodes do not dial each other: %s", error)
        return
    mesh = Mesh(mode, exchange.users)
    workers.preparations.insert(0, mesh)  # before the exchange


class Mesh:
    """The mesh of one agent: a `monitors.Preparation`, and a `peer_exchange.PeerUser`."""

    use = MESH
    ends_job = True

    def __init__(self, mode: str, users: list[PeerUser], clock: Clock = SYSTEM_CLOCK) -> None:
        """In a round in which it needs the exchange, it is one of its `users`.

        Args:
            mode: `WARN` or `REQUIRE`.
            users: the users of other nodes' records.
            clock: of `wake_at`.
        """
        self._users = users
        self.failure = self.failed_node = ""
        self._required = mode == REQUIRE
        self._clock = clock
        self._group: WorkerGroup | None = None
        self._listener: MeshListener | None = None
        self._attempt: MeshAttempt | None = None
        self._work: Background[MeshAttempt] = Background("rallypoint-mesh")
        self._verdict_by = math.inf
        """The time until which a verdict that another node requests is awaited; infinite if none is."""
        self._sentence = self._node = ""
        """The text and the node of the failure that it will announce."""

    # What needs the records of other nodes

    def reserve(self, group: WorkerGroup) -> Sequence[int]:
        """Listen."""
        self.cancel()
        assert group.placement is not None
        self._group = group
        only_here = is_loopback(group.placement.store_address)
        self._listener = MeshListener(_own_address(group, group.placement), only_here=only_here)
        return (self._listener.port,)

    def wanted(self, placement: Placement) -> Collection[int]:
        """The nodes that this node dials."""
        return dialled_ranks(placement.group_rank, placement.group_world_size)

    def take(self, records: Mapping[int, PeerRecord]) -> None:
        """Dial the nodes of these records."""
        group, listener = self._group, self._listener
        assert group is not None
        assert group.placement is not None
        assert listener is not None, "the exchange has reserved its port"
        place, scope = group.placement, _scope(group, group.placement)
        own = records[place.group_rank]
        listener.own = MeshNode(scope, place.group_rank, own.node)
        others = [records[rank] for rank in dialled_ranks(place.group_rank, place.group_world_size)]
        opener = store_opener(group, place)
        self._attempt = MeshAttempt(place, listener.own, own, others, opener, self._clock)
        self._work.start(self._attempt.run)

    def missed(self, why: str) -> bool:
        """The records do not arrive. If it is required that the other nodes are reached, this is a failure."""
        self._end_attempt()
        self._leave_exchange()
        if self._required:
            self.failure = why
        else:
            log.warning("this node does not dial the others: %s", why)
        return True

    # What each round has to wait for

    def begin(self, group: WorkerGroup) -> None:
        """Begin; the exchange begins after this, and asks `wanted` for the nodes."""
        place = group.placement
        assert place is not None
        self._leave_exchange()
        if place.group_world_size > 1 and round_scope(group, place) in FIRST_ROUNDS:
            self._users.append(self)

    def preparing(self) -> bool:
        """Whether the other nodes are being dialled, or the verdict is awaited."""
        return self._attempt is not None or self._verdict_by < math.inf

    def fds(self) -> list[int]:
        """Readable when a node dials, or the thread is done."""
        return [*self._work.fds(), *([] if self._listener is None else self._listener.fds())]

    def wake_at(self) -> float:
        """The time at which the thread counts as stuck, or the verdict as missing."""
        return min(self._verdict_by, math.inf if self._attempt is None else self._attempt.give_up_at)

    def step(self) -> None:
        """Greet nodes that dial, and take the results of the thread."""
        if self._listener is not None:
            self._listener.step()
        if (done := self._work.take()) is not None:
            self._end(done)
        now = self._clock.monotonic()
        if self._attempt is not None and now >= self._attempt.give_up_at:
            self._attempt.trouble = self._attempt.sentence("nothing has come in time")
            self._end(self._attempt)
        if now >= self._verdict_by:
            self._verdict_by, self.failure, self.failed_node = math.inf, self._sentence, self._node

    def cancel(self) -> None:
        """Drop work in progress. Idempotent."""
        self.failure = self.failed_node = ""
        self._verdict_by = math.inf
        self._end_attempt()

    def close(self) -> None:
        """The run is over. Idempotent."""
        self.cancel()
        self._work.close()

    # Inside

    def _leave_exchange(self) -> None:
        if self in self._users:
            self._users.remove(self)

    def _end_attempt(self) -> None:
        self._work.forget()
        attempt, self._attempt = self._attempt, None
        listener, self._listener = self._listener, None
        if attempt is not None:
            attempt.end()
        if listener is not None:
            listener.close()

    def _end(self, done: MeshAttempt) -> None:
        """The nodes have been dialled, or that has failed."""
        self._end_attempt()
        self._leave_exchange()
        for line in done.lines:
            if concerned(line, done.rank) and not (self._required and done.rank == 0 and line is done.lines[0]):
                log.warning("%s", line.text)
        if done.total > len(done.lines) and done.rank == 0:
            log.warning("and %d more such findings", done.total - len(done.lines))
        if done.trouble and not self._required:
            log.warning("it is not known whether the nodes reach each other: %s", done.trouble)
        if not done.trouble and not done.lines:
            log.info(
                "the nodes of the round reach each other (this one has dialled %d, in %.3f s)", done.count, done.took
            )
        if not self._required or not (done.trouble or done.lines):
            return
        if done.trouble:
            self.failure, self.failed_node = done.trouble, ""
            return
        more = f"; {done.total - 1} more such findings are in the log of group rank 0" if done.total > 1 else ""
        self._sentence = f"{done.lines[0].text}{more}"
        self._node = done.lines[0].node
        if done.rank == 0:
            self.failure, self.failed_node = self._sentence, self._node
        else:
            self._verdict_by = self._clock.monotonic() + _VERDICT


def _own_address(group: WorkerGroup, placement: Placement) -> str:
    """The address of this node for the others, as in its record; empty if that would need a name server."""
    store = placement.store_address
    given = group.spec.local_addr or (store if placement.group_rank == 0 else "")
    is_numeric = ":" in store or store.replace(".", "").isdigit()
    return given or (own_address(Endpoint(store, placement.store_port)) if is_numeric else "")


def _scope(group: WorkerGroup, placement: Placement) -> str:
    """A text that the nodes of this round, and no others, have in common."""
    return f"{group.spec.rdzv_handler.get_run_id()}/{placement.origin}/{round_scope(group, placement)}"
