"""What each of 16,384 nodes costs the coordinator's pure core, beside one of 1,024: no socket, no message on a wire.

Coordinators are driven by their methods, with a session for each node. What is compared is one job with 16 jobs of a
sixteenth of its nodes, a node of each after another: so many nodes do not fit a processor's caches, and that is so for
both. What is left is work that looks at all nodes of a job. Figures are processor time of this process for one node,
the least of some rounds.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

from benchmarks.case import BenchError, Budget, Case, Row, Sample, Settings, in_turn
from rallypoint.control.coordinator.coordinator import Coordinator, OutgoingMessage
from rallypoint.control.coordinator.sessions import SessionRecord, SessionState
from rallypoint.control.membership import state as membership
from rallypoint.control.membership.state import Fail, NodeId, NodeInfo, Reason, Succeed
from rallypoint.control.protocol.messages import (
    JobEnded,
    JoinRequest,
    LeaveRequest,
    NextStore,
    Placed,
    ProgressRequest,
    Request,
    ResumeRequest,
)
from rallypoint.failures.cause import Cause

_NODES, _QUICK_NODES = 16384, 1024
_JOBS = 16
"""The number of jobs that one is compared with."""
_BUDGET = Budget(1.3)
_ONE, _MANY = "one job", f"{_JOBS} jobs"
_CAUSE = Cause(0, 0, "host", 42, 1, "RuntimeError: no", "Traceback\n" * 400, 0.0, "")
_TIMEOUT = 600.0
_RACK, _SEGMENT = 16, 8
_ARRIVAL = 2.0  # seconds for all that come to a running round


class _Job:
    """A coordinator, its nodes, and what each was told last of its place. `now` stands still unless a part moves it."""

    def __init__(self, nodes: int, more: int = 0, segment: int = 1) -> None:
        """A job of so many nodes, and of up to `more` besides."""
        self.settings = membership.Settings("bench", nodes - 8, nodes + more, last_call_timeout=1.0, segment=segment)
        self.coordinator = Coordinator(self.settings, "first")
        self.nodes = [_node(number) for number in range(nodes)]
        self.sessions: dict[NodeId, int] = {}
        self._nodes: dict[int, NodeId] = {}
        self._numbers = count(1)
        self.placed: dict[NodeId, Placed] = {}
        self.held: Mapping[NodeId, Placed] = {}
        """The places before the last ones."""
        self.ended = 0
        """Nodes that were told that the job has ended."""
        self.now = 0.0

    def open(self, node: NodeId, *, resumes: bool = False) -> None:
        number = self.sessions[node] = next(self._numbers)
        self._nodes[number] = node
        state = SessionState.RESUMING if resumes else SessionState.OPEN
        record = SessionRecord(node, node.addr, "10.0.0.1", node.addr, self.settings, state=state)
        self.coordinator.open(number, record, self.now)

    def join(self, node: NodeId) -> None:
        self.say(node, JoinRequest(_info(node), _TIMEOUT, addresses=(node.addr,), keeps_place=True))

    def say(self, node: NodeId, request: Request) -> None:
        self.deliver(self.coordinator.receive(self.sessions[node], request, self.now).messages)

    def deliver(self, sends: Sequence[OutgoingMessage]) -> None:
        for session, notification in sends:
            if isinstance(notification, Placed):
                self.placed[self._nodes[session]] = notification
            elif isinstance(notification, JobEnded):
                self.ended += 1

    def resume(self, node: NodeId, held: Placed, *, joining: bool) -> None:
        """The node comes back in another session, and says what it holds."""
        place = held.placement
        self.open(node, resumes=True)
        request = ResumeRequest(
            self.coordinator.incarnation,
            _info(node),
            place.round,
            place.group_rank,
            place.group_world_size,
            failures=place.restarts,
            round_over=joining,
            last_ended_round=place.round if joining else place.round - 1,
            joining=joining,
            origin=place.origin,
        )
        self.say(node, request)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.deliver(self.coordinator.tick(self.now).messages)

    def fail(self, round_: int, *, restarts_workers: bool = False) -> None:
        self.held = dict(self.placed)
        self.say(self.nodes[len(self.nodes) // 2], Fail(round_, _CAUSE, 3, restarts_workers))

    def check(self, round_: int) -> None:
        """All nodes have their places in that round."""
        ranks = sorted(self.placed[node].placement.group_rank for node in self.nodes)
        rounds = {self.placed[node].placement.round for node in self.nodes}
        runs = set(self.coordinator.state.participants) == set(self.nodes) and self.coordinator.state.complete
        if ranks != list(range(len(self.nodes))) or rounds != {round_} or not runs:
            raise BenchError(f"{len(self.nodes)} nodes were placed in rounds {rounds}, not in {round_}")


def _node(number: int, kind: str = "node") -> NodeId:
    return NodeId(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 100, number, f"{kind}-{number}")


def _info(node: NodeId) -> NodeInfo:
    return NodeInfo("default", 8, node.addr, 29500, program="train.py", domain=f"rack-{node.number // _RACK}")


def _nothing(_job: _Job) -> None:
    return None


class _Part(NamedTuple):
    """One figure: what is done for each node, and for each job before that. `ready` and `check` are not measured."""

    name: str
    each: Callable[[_Job, NodeId], None]
    check: Callable[[_Job], None]
    ready: Callable[[_Job], None] = _nothing
    begin: Callable[[_Job], None] = _nothing


def _enter(job: _Job, node: NodeId) -> None:
    job.open(node)
    job.join(node)


def _three_heartbeats(job: _Job, node: NodeId) -> None:
    for _ in range(3):
        job.coordinator.heartbeat(job.sessions[node], job.now)


def _all_join_again(job: _Job) -> None:
    job.fail(1)
    for node in job.nodes:
        job.join(node)
    job.check(2)
    job.placed.clear()


def _resume_joining(job: _Job, node: NodeId) -> None:
    job.resume(node, job.held[node], joining=True)
    job.join(node)


def _lose_one(job: _Job) -> None:
    lost = job.nodes.pop()
    del job.placed[lost]
    job.deliver(job.coordinator.close(job.sessions.pop(lost), job.now).messages)


def _all_but_one_join(job: _Job) -> None:
    job.fail(3)
    for node in job.nodes[:-1]:
        job.join(node)


def _ask_progress(job: _Job, node: NodeId) -> None:
    job.say(node, ProgressRequest())
    job.coordinator.wake_at()


def _last_joins(job: _Job) -> None:
    job.join(job.nodes[-1])
    job.check(4)


def _take_over(job: _Job) -> None:
    state, job.coordinator = job.coordinator.state, Coordinator(job.settings, "first")
    job.coordinator.restore(state, job.now)


def _begin_anew(job: _Job) -> None:
    job.coordinator = Coordinator(job.settings, "second")


def _leave(job: _Job, node: NodeId) -> None:
    job.say(node, LeaveRequest())
    job.coordinator.close(job.sessions[node], job.now, Reason.DEPARTED)


def _check_end(job: _Job) -> None:
    if job.ended != len(job.nodes):
        raise BenchError(f"{job.ended} of {len(job.nodes)} nodes were told that the job has succeeded")


def _enter_all(job: _Job) -> None:
    for node in job.nodes:
        _enter(job, node)
    job.check(0)
    job.say(min(job.placed, key=lambda node: job.placed[node].placement.group_rank), NextStore(0, 29501))


def _run_with_room(job: _Job) -> None:
    for node in job.nodes:
        _enter(job, node)
    job.tick(job.settings.last_call_timeout)
    job.check(0)


def _one_more(job: _Job, node: NodeId) -> None:
    more = _node(node.number, "new")._replace(addr=f"fd00::{node.number:x}")
    _enter(job, more)
    job.now += _ARRIVAL / len(job.nodes)
    if job.coordinator.wake_at() <= job.now:
        job.tick(0.0)


def _check_waiting(job: _Job) -> None:
    if len(job.coordinator.state.wait_list) * job.settings.segment != len(job.nodes):
        raise BenchError(f"{len(job.coordinator.state.wait_list)} nodes wait instead of {len(job.nodes)}")


def _resume(job: _Job, node: NodeId) -> None:
    job.resume(node, job.placed[node], joining=False)


_PARTS = (
    _Part("first round: session, join and place", _enter, lambda job: job.check(0)),
    _Part(
        "three heartbeats, and a check of all",
        _three_heartbeats,
        _nothing,
        begin=lambda job: job.tick(job.settings.lease / 4),
    ),
    _Part("a failure, until all have joined again", _Job.join, lambda job: job.check(1), begin=lambda job: job.fail(0)),
    _Part("all missed their places and come back", _resume_joining, lambda job: job.check(2), _all_join_again),
    _Part("a node is lost, until all have joined again", _Job.join, lambda job: job.check(3), begin=_lose_one),
    _Part("all ask for the progress", _ask_progress, _last_joins, _all_but_one_join),
    _Part("a successor with the state, to which all come back", _resume, lambda job: job.check(4), begin=_take_over),
    _Part("a new coordinator, which all fill", _resume, lambda job: job.check(4), begin=_begin_anew),
    _Part("all succeed, and are told the end", lambda job, node: job.say(node, Succeed(4)), _check_end),
    _Part("all leave", _leave, _nothing),
)
_KEPT = (
    _Part(
        "a failure, after which all keep their places",
        lambda _job, _node: None,
        lambda job: job.check(1),
        _enter_all,
        lambda job: job.fail(0, restarts_workers=True),
    ),
)
_WITH_ROOM = (_Part("as many nodes come to a running round", _one_more, _check_waiting, _run_with_room),)

_IN_SEGMENTS = tuple(part._replace(name=f"{part.name}, in segments") for part in (_PARTS[0], _PARTS[2], *_WITH_ROOM))
"""The same with ranks in segments."""


def _measured(jobs: int, nodes: int) -> Mapping[str, float]:
    """Microseconds a node, by part, of so many jobs of so many nodes."""
    found: dict[str, float] = {}
    for parts, room, segment in (
        *((_PARTS, 0, 1), (_KEPT, 0, 1), (_WITH_ROOM, nodes, 1)),
        *((_IN_SEGMENTS[:2], 0, _SEGMENT), (_IN_SEGMENTS[2:], nodes, _SEGMENT)),
    ):
        made = [_Job(nodes, room, segment) for _ in range(jobs)]
        for part in parts:
            for job in made:
                part.ready(job)
            found[part.name] = _seconds(part, made) / (jobs * nodes) * 1e6
            for job in made:
                part.check(job)
    return found


def _seconds(part: _Part, jobs: Sequence[_Job]) -> float:
    gc.collect()  # what was left by the part before is not looked through in this one
    gc.freeze()
    try:
        begun = time.process_time()
        for job in jobs:
            part.begin(job)
        for nodes in zip(*[job.nodes for job in jobs], strict=True):
            for job, node in zip(jobs, nodes, strict=True):
                part.each(job, node)
        return time.process_time() - begun
    finally:
        gc.unfreeze()


def _run(settings: Settings) -> list[Row]:
    nodes = _QUICK_NODES if settings.quick else _NODES
    sides = {_MANY: partial(_measured, _JOBS, nodes // _JOBS), _ONE: partial(_measured, 1, nodes)}
    turns = in_turn("core", settings.rounds, sides)
    one, many = (turns.results.get(side) or None for side in (_ONE, _MANY))
    base = f"ours of {nodes // _JOBS:,}"
    return [
        Row(
            f"{nodes:,} nodes, core: {part.name}",
            "µs",
            _least(one, part),
            _least(many, part),
            _BUDGET,
            base,
            "",
            remarks,
        )
        for remarks in (turns.remarks(),)
        for part in (*_PARTS, *_KEPT, *_WITH_ROOM, *_IN_SEGMENTS)
    ]


def _least(results: Sequence[Mapping[str, float]] | None, part: _Part) -> Sample | None:
    return None if results is None else Sample((min(each[part.name] for each in results),))


CASE = Case("core", "what a node costs the coordinator's pure core among 1,024 and among 16,384", _run)
