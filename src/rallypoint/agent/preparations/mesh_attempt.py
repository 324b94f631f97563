"""One round's mesh: a thread dials the other nodes, and shares its findings over the worker store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from rallypoint.base.clock import Clock, Deadline
from rallypoint.base.endpoint import Endpoint
from rallypoint.base.log import printable
from rallypoint.preflight.dialing import DIAL_TIMEOUT, Target, dial_all
from rallypoint.preflight.mesh import (
    Finding,
    MeshLine,
    MeshNode,
    decode_finding,
    decode_lines,
    encode_finding,
    encode_lines,
    mesh_lines,
)

if TYPE_CHECKING:
    from rallypoint.agent.preparations.peer_exchange import OpenStore
    from rallypoint.agent.preparations.peer_record import PeerRecord
    from rallypoint.protocol.messages import Placement
    from rallypoint.store.api import Store

MESH = "mesh"
"""The name of its ports."""

_FINDINGS, _LINES = 10.0, 20.0
"""Seconds that group rank 0 waits for the findings of the others, beyond the time in which all have dialled; and that
these wait for its summary.
"""
_MAX_SENTENCE = 1000


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
