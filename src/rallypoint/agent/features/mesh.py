"""The mesh of `--preflight`: before the first workers of a node start, its agent dials the other nodes of the round.

Laws:

1. It is done in the job's first round only, which all nodes know by its number: a later node would dial nodes that have
   done it. If that round ends early, it is not done.
2. Every node listens before another can know its address, and does so until all have dialled, or its round is over.
3. All nodes get the same result (`clusters.preflight.mesh`), over the round's worker store. If it is required that all
   are reached, group rank 0 announces the failure, and the others wait for the verdict.
4. The loop never waits: it greets nodes that dial, and a separate thread dials and uses the store.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from rallypoint.agent.features.peers import FIRST_ROUNDS, exchange_of, round_scope, store_opener
from rallypoint.agent.sources import Preparation
from rallypoint.base.clock import SYSTEM_CLOCK, Clock, Deadline
from rallypoint.base.endpoint import Endpoint, is_loopback, own_address
from rallypoint.base.errors import UserError
from rallypoint.base.log import get_logger, printable
from rallypoint.base.mailbox import Background
from rallypoint.clusters.preflight.dialing import DIAL_TIMEOUT, MeshListener, Target, dial_all
from rallypoint.clusters.preflight.mesh import (
    Finding,
    MeshLine,
    MeshNode,
    concerned,
    decode_finding,
    decode_lines,
    dialled_ranks,
    encode_finding,
    encode_lines,
    mesh_lines,
)
from rallypoint.clusters.preflight.results import REQUIRE

if TYPE_CHECKING:
    from rallypoint.agent.features.peers import OpenStore, PeerRecord, PeerUser
    from rallypoint.agent.spec import WorkerGroup
    from rallypoint.agent.workers import WorkerController
    from rallypoint.control.protocol.messages import Placement
    from rallypoint.store.api import Store

log = get_logger(__name__)

MESH = "mesh"
"""The name of its ports."""

_FINDINGS, _LINES = 10.0, 20.0
"""Seconds that group rank 0 waits for the findings of the others, beyond the time in which all have dialled; and that
these wait for its summary.
"""
_MAX_SENTENCE = 1000


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
    workers.add_preparation(mesh, first=True)  # before the exchange


class Mesh(Preparation):
    """The mesh of one agent, which is a user of `peers`."""

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
        return [*self._work.fds(), *([] if self._listener is None else self._listener.fds())]

    def wake_at(self) -> float:
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


# The attempt of one round


class MeshAttempt:
    """The mesh of one round, on a thread of its own."""

    def __init__(
        self,
        placement: Placement,
        own: MeshNode,
        record: PeerRecord,
        others: Sequence[PeerRecord],
        open_store: OpenStore,
        clock: Clock,
    ) -> None:
        self.rank = own.group_rank
        self.count = len(others)
        self.lines: list[MeshLine] = []
        self.total = 0
        """The number of all lines, of which `lines` may be only the first."""
        self.trouble = ""
        """A sentence on why it is not known which nodes are reached."""
        self.took = 0.0
        """Seconds from the dialing to the lines."""
        self._clock = clock
        self._began = clock.monotonic()
        self._limit = Deadline.after(DIAL_TIMEOUT + (_LINES if self.rank else _FINDINGS), clock)
        self.give_up_at = self._limit.at + DIAL_TIMEOUT
        self._placement = placement
        self._own = own
        self._record = record
        self._others = others
        self._open_store = open_store
        self._over = False
        self._lock = threading.Lock()
        self._close_store: Callable[[], None] = lambda: None

    def run(self) -> MeshAttempt:
        """Dial, and exchange the findings. Returns this object, which has the result."""
        try:
            self._work()
        except Exception as error:  # a store may be a third party's, and raise anything
            self.trouble = self.sentence(printable(f"{error}" or type(error).__name__, _MAX_SENTENCE))
        return self

    def end(self) -> None:
        """Drop the result. Idempotent."""
        with self._lock:
            self._over = True
            close, self._close_store = self._close_store, lambda: None
        close()

    def sentence(self, why: str) -> str:
        """A sentence on why it is not known which nodes are reached."""
        where = Endpoint(self._placement.store_address, self._placement.store_port)
        return f"{self._own.node} cannot exchange what it has found over the worker store at {where}: {why}"

    def _is_over(self) -> bool:
        with self._lock:
            return self._over

    def _work(self) -> None:
        opened = self._open_store(self._limit.remaining())  # now, while the round is known to run
        with self._lock:
            if opened.is_own:
                self._close_store = getattr(opened.store, "close", lambda: None)
        if self._is_over():
            self.end()
            return
        targets = [
            Target(MeshNode(self._own.scope, each.group_rank, each.node), each.address, each.ports[MESH][0])
            for each in self._others
            if MESH in each.ports
        ]
        failures = dial_all(targets, self._own)
        if self._is_over():
            return
        where = str(Endpoint(self._record.address, self._record.ports[MESH][0]))
        own = encode_finding(Finding(self._own.node, where, failures))
        opened.store.set(opened.key(f"mesh/{self.rank}"), own)
        if self.rank == 0:
            absent = {each.group_rank: each.node for each in self._others if MESH not in each.ports}
            found = self._findings(opened.store, opened.key, absent)
            data = encode_lines(mesh_lines(found, self._placement.group_world_size, absent))
            opened.store.set(opened.key("mesh/lines"), data)
        else:
            self._wait(opened.store, [opened.key("mesh/lines")])
            data = bytes(opened.store.get(opened.key("mesh/lines")))
        self.total, self.lines = decode_lines(data, self._placement.group_world_size)
        self.took = self._clock.monotonic() - self._began

    def _findings(self, store: Store, key: Callable[[object], str], absent: Collection[int]) -> Mapping[int, Finding]:
        """The findings of all nodes except absent ones, as far as they arrive in time."""
        count = self._placement.group_world_size
        keys = {rank: key(f"mesh/{rank}") for rank in range(count) if rank not in absent}
        with suppress(Exception):  # missing ones are seen below
            self._wait(store, list(keys.values()))
        there = [rank for rank in keys if store.check([keys[rank]])]
        values = store.multi_get([keys[rank] for rank in there])
        return {rank: decode_finding(bytes(data), rank, count) for rank, data in zip(there, values, strict=True)}

    def _wait(self, store: Store, keys: list[str]) -> None:
        store.wait(keys, timedelta(seconds=max(0.001, self._limit.remaining())))
