"""What each node costs the coordinator's pure core, from 1,024 to 16,384 nodes: no socket, no message on a wire.

A `Coordinator` is driven by its methods, with one session a node. All figures are processor time of this process for
one node, the least of some rounds: a cost that grows with the number of nodes is work that looks at all of them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count

from benchmarks.case import OURS, Case, Settings
from benchmarks.errors import BenchError
from benchmarks.stats import Sample
from benchmarks.table import Budget, Row
from benchmarks.turns import in_turn
from rallypoint.control.coordinator.coordinator import Coordinator
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership import state as membership
from rallypoint.control.membership.state import Fail, NodeId, NodeInfo, Reason, Succeed
from rallypoint.control.protocol.messages import (
    JoinRequest,
    LeaveRequest,
    Notification,
    Placed,
    ProgressRequest,
    Request,
    ResumeRequest,
)
from rallypoint.failures.cause import Cause

_SIZES = (1024, 4096, 16384)
_QUICK_SIZES = (64, 1024)
_GROWTH = 1.3
"""How much more a node may cost among the most nodes than among the fewest."""
_CAUSE = Cause(0, 0, "host", 42, 1, "RuntimeError: no", "Traceback\n" * 400, 0.0, "")
_TIMEOUT = 600.0


class _Job:
    """A coordinator, its nodes, and the last placement of each. `now` stands still unless a part moves it."""

    def __init__(self, nodes: int, more: int = 0) -> None:
        """A job of so many nodes, and of up to `more` besides."""
        self.settings = membership.Settings("bench", nodes - 8, nodes + more, last_call_timeout=1.0)
        self.coordinator = Coordinator(self.settings, "first")
        self.nodes = [NodeId(f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}", 100, i, f"node-{i}") for i in range(nodes)]
        self.infos = {node: NodeInfo("default", 8, node.addr, 29500, program="train.py") for node in self.nodes}
        self.sessions: dict[NodeId, int] = {}
        self._nodes: dict[int, NodeId] = {}
        self._numbers = count(1)
        self.placed: dict[NodeId, Placed] = {}
        self.now = 0.0

    def open(self, node: NodeId, *, resumes: bool = False) -> None:
        number = self.sessions[node] = next(self._numbers)
        self._nodes[number] = node
        record = SessionRecord(node, node.addr, "10.0.0.1", node.addr, self.settings, resumes=resumes)
        self.coordinator.open(number, record, self.now)

    def join(self, node: NodeId) -> None:
        self.say(node, JoinRequest(self.infos[node], _TIMEOUT, addresses=(node.addr,)))

    def say(self, node: NodeId, request: Request) -> None:
        self.deliver(self.coordinator.receive(self.sessions[node], request, self.now))

    def deliver(self, sends: list[tuple[int, Notification]]) -> None:
        for session, notification in sends:
            if isinstance(notification, Placed):
                self.placed[self._nodes[session]] = notification

    def resume(self, node: NodeId, held: Placed, *, joining: bool) -> None:
        """The node comes back in another session, and says what it held."""
        place = held.placement
        self.open(node, resumes=True)
        self.say(
            node,
            ResumeRequest(
                self.coordinator.incarnation,
                self.infos[node],
                place.round,
                place.group_rank,
                place.group_world_size,
                failures=place.restarts,
                round_over=joining,
                last_ended_round=place.round if joining else place.round - 1,
                joining=joining,
                origin=place.origin,
            ),
        )

    def check(self, round_: int) -> None:
        """All nodes that are left have their place in that round."""
        ranks = sorted(self.placed[node].placement.group_rank for node in self.nodes)
        rounds = {self.placed[node].placement.round for node in self.nodes}
        if ranks != list(range(len(self.nodes))) or rounds != {round_}:
            raise BenchError(f"{len(self.nodes)} nodes were placed in rounds {rounds}, not in {round_}")


@contextmanager
def _collected() -> Iterator[None]:
    """Without what was left by the part before."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _measured(nodes: int) -> Mapping[str, float]:
    """Microseconds a node, by part."""
    found: dict[str, float] = {}

    def timed(part: str, run: Callable[[], None]) -> None:
        with _collected():
            begun = time.process_time()
            run()
            found[part] = (time.process_time() - begun) / nodes * 1e6

    job = _Job(nodes)
    timed("first round: session, join, place", lambda: _first_round(job))
    timed("heartbeats: three each, and the checks in between", lambda: _heartbeats(job))
    timed("a failure, until all are placed again", lambda: _failure(job))
    held = _fail_and_join(job, 1)
    timed("all missed their place and come back", lambda: _missed_places(job, held))
    timed("a node is lost, until the others are placed again", lambda: _lost_node(job))
    _fail_and_join(job, 3, but=1)
    timed("all ask for the progress while one is missing", lambda: _progress(job))
    job.join(job.nodes[-1])
    job.check(4)
    timed("a successor has the state, all come back", lambda: _taken_over(job))
    timed("a new coordinator is filled by the nodes", lambda: _filled(job))
    timed("all succeed, are told, and leave", lambda: _success(job))
    more = _Job(nodes, nodes // 4)
    _first_round(more)
    more.now += 2.0
    more.deliver(more.coordinator.tick(more.now))
    more.check(0)
    timed("a quarter more nodes come to a running round", lambda: _arrivals(more))
    return found


def _first_round(job: _Job) -> None:
    for node in job.nodes:
        job.open(node)
        job.join(node)


def _heartbeats(job: _Job) -> None:
    job.check(0)
    for _ in range(3):
        for quarter in range(0, len(job.nodes), len(job.nodes) // 4):
            for node in job.nodes[quarter : quarter + len(job.nodes) // 4]:
                job.coordinator.heartbeat(job.sessions[node], job.now)
            job.now += job.settings.lease / 12
            job.deliver(job.coordinator.tick(job.now))
            job.coordinator.wake_at()


def _failure(job: _Job) -> None:
    _fail_and_join(job, 0)
    job.check(1)


def _fail_and_join(job: _Job, round_: int, but: int = 0) -> Mapping[NodeId, Placed]:
    """A worker fails in a round, and all nodes `but` so many join again; returns the places before."""
    held = dict(job.placed)
    job.say(job.nodes[len(job.nodes) // 2], Fail(round_, _CAUSE, 3))
    for node in job.nodes[: len(job.nodes) - but]:
        job.join(node)
    return held


def _missed_places(job: _Job, held: Mapping[NodeId, Placed]) -> None:
    job.check(2)
    job.placed.clear()
    for node in job.nodes:
        job.resume(node, held[node], joining=True)
        job.join(node)
    job.check(2)


def _lost_node(job: _Job) -> None:
    lost = job.nodes.pop()
    job.placed.clear()
    job.deliver(job.coordinator.close(job.sessions.pop(lost), job.now))
    for node in job.nodes:
        job.join(node)
    job.check(3)


def _progress(job: _Job) -> None:
    for node in job.nodes[:-1]:
        job.say(node, ProgressRequest())
        job.coordinator.wake_at()


def _taken_over(job: _Job) -> None:
    state, job.coordinator = job.coordinator.state, Coordinator(job.settings, "first")
    job.coordinator.restore(state, job.now)
    for node in job.nodes:
        job.resume(node, job.placed[node], joining=False)
    _check_runs(job)


def _filled(job: _Job) -> None:
    job.coordinator = Coordinator(job.settings, "second")
    for node in job.nodes:
        job.resume(node, job.placed[node], joining=False)
    _check_runs(job)


def _check_runs(job: _Job) -> None:
    state = job.coordinator.state
    if not state.complete or set(state.participants) != set(job.nodes):
        raise BenchError(f"round {state.round} does not run on with the {len(job.nodes)} nodes that have come back")


def _success(job: _Job) -> None:
    for node in job.nodes:
        job.say(node, Succeed(4))
    if job.coordinator.state.verdict is None:
        raise BenchError("all have succeeded, and the job has not ended")
    for node in job.nodes:
        job.say(node, LeaveRequest())
        job.coordinator.close(job.sessions[node], job.now, Reason.DEPARTED)


def _arrivals(job: _Job) -> None:
    """They come one after another, within two seconds."""
    for i in range(len(job.nodes) // 4):
        node = NodeId(f"10.200.{i >> 8}.{i & 255}", 100, i, f"new-{i}")
        job.infos[node] = NodeInfo("default", 8, node.addr, 29500, program="train.py")
        job.open(node)
        job.join(node)
        job.now += 8.0 / len(job.nodes)
        if job.coordinator.wake_at() <= job.now:
            job.deliver(job.coordinator.tick(job.now))


def _run(settings: Settings) -> list[Row]:
    sizes = _QUICK_SIZES if settings.quick else _SIZES
    turns = in_turn("core", settings.rounds, {f"{nodes:,}": lambda nodes=nodes: _measured(nodes) for nodes in sizes})  # type: ignore[misc]
    few, *others = ((side, _least(results)) for side, results in turns.results.items())
    rows = []
    for part, base in few[1].items():
        for side, figures in others:
            last = side == others[-1][0]
            rows.append(
                Row(
                    f"core, {side} nodes: {part}",
                    "µs",
                    Sample((figures[part],)),
                    Sample((base,)),
                    Budget(_GROWTH) if last else None,
                    f"{OURS} of {few[0]}",
                    remarks=turns.remarks(),
                )
            )
    return rows


def _least(results: list[Mapping[str, float]]) -> Mapping[str, float]:
    return {part: min(each[part] for each in results) for part in results[0]}


CASE = Case("core", "what a node costs the coordinator's pure core among 1,024 to 16,384", _run)
