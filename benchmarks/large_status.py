"""What the status of very many nodes costs, from the coordinator's state to what is printed, as processor time.

There are no sockets: a coordinator is filled with a round that runs, a session and a report for each node. Its lock is
held while a view is taken; the snapshot is made, encoded, decoded and shown without it. The same for 1,024 nodes stands
beside it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial

from benchmarks.case import OURS, THEIRS, Budget, Case, Row, Settings, in_turn, row
from rallypoint.control.coordinator.coordinator import Coordinator
from rallypoint.control.coordinator.sessions import SessionRecord
from rallypoint.control.membership.state import NodeId, NodeInfo, Participant, State
from rallypoint.control.membership.state import Settings as JobSettings
from rallypoint.control.protocol.messages import NodeReport
from rallypoint.observe.metrics import job_families
from rallypoint.observe.status import status_fields, status_json, status_lines
from rallypoint.observe.watching.messages import PAGE_NODES, NodeView, Snapshot, decode_snapshot, snapshot_parts
from rallypoint.observe.watching.snapshots import JobView, NodeReports, SnapshotMaker, at_once

_NODES, _FEW, _QUICK = 12_500, 1024, 128
_WORKERS = 8
_TIMES = 5
_WIDE = 100_000
_LOCK = Budget(10.0, unit="ms")
_ALL = Budget(1000.0, unit="ms")


class _Job:
    """A job whose round of so many nodes runs."""

    def __init__(self, nodes: int) -> None:
        self._coordinator = Coordinator(JobSettings("bench", nodes, nodes), "bench")
        self._reports = NodeReports()
        self._maker = SnapshotMaker()
        self._members = {_node(number): _member(number) for number in range(nodes)}
        for number, node in enumerate(self._members):
            self._coordinator.open(number, SessionRecord(node, node.addr), 0.0)
        self.another_round()

    def another_round(self) -> None:
        """A state that nothing is remembered of, and as many new reports."""
        self._members = dict(self._members)
        self._coordinator.state = State(complete=True, participants=self._members)
        workers = range(_WORKERS)
        for node in self._members:
            steps = tuple(100 for _ in workers)
            self._reports.add(
                node, NodeReport(0, tuple(9000 + each for each in workers), 100, 1.0, (0.5,) * 8, steps), 0.0
            )

    def view(self) -> JobView:
        return JobView.from_coordinator(self._coordinator, self._reports, 1.0)

    def snapshot(self) -> Snapshot:
        return at_once(self._maker.snapshot(self.view()))

    def first_snapshot(self) -> Snapshot:
        self.another_round()
        return self.snapshot()

    def all_nodes(self) -> str:
        """`rallyctl status --json --all`, both ends of it."""
        view, left = self.view(), 1
        rows: list[NodeView] = []
        while left:
            part = _sent(at_once(self._maker.page(view, len(rows))))
            rows += part.nodes
            left = part.not_shown
        return status_json(part._replace(nodes=tuple(rows)), 1e9)


def _node(number: int) -> NodeId:
    address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
    return NodeId(address, 1000 + number, number, f"node-{number:05}.cluster.example.org")


def _member(number: int) -> Participant:
    return Participant(NodeInfo("default", _WORKERS, "", 7000, None, 3, "train.py"), number)


def _sent(snapshot: Snapshot) -> Snapshot:
    return decode_snapshot(b"".join(each.data for each in snapshot_parts(snapshot)))


_STEPS: tuple[tuple[str, Callable[[_Job], object], Budget | None], ...] = (
    ("under the lock", _Job.view, _LOCK),
    ("snapshot, first of a round", _Job.first_snapshot, None),
    ("snapshot, again", _Job.snapshot, None),
    ("snapshot sent and shown as text", lambda job: status_lines(_sent(job.snapshot()), _WIDE), _ALL),
    ("the page's JSON", lambda job: json.dumps(status_fields(job.snapshot(), 1e9)), None),
    ("metrics", lambda job: job_families([job.snapshot()]), None),
    (f"all rows, {PAGE_NODES} at a time, as JSON", _Job.all_nodes, None),
)


def _run(settings: Settings) -> list[Row]:
    many, few = (2 * _QUICK, _QUICK) if settings.quick else (_NODES, _FEW)
    jobs = {OURS: _Job(many), THEIRS: _Job(few)}
    rows: list[Row] = []
    for what, do, budget in _STEPS:
        sides = {side: partial(_milliseconds, do, job) for side, job in jobs.items()}
        turns = in_turn(f"{many} nodes: {what}", settings.rounds, sides)
        made = row(f"{many:,} nodes: {what}", "ms", turns, budget)
        rows.append(Row(made.what, "ms", made.ours, made.base, budget, f"{few:,} nodes", remarks=made.remarks))
    return rows


def _milliseconds(do: Callable[[_Job], object], job: _Job) -> float:
    """The least processor time of a few: what else runs on the machine only adds to it."""
    return 1000 * min(_once(do, job) for _ in range(_TIMES))


def _once(do: Callable[[_Job], object], job: _Job) -> float:
    begin = time.process_time()
    do(job)
    return time.process_time() - begin


CASE = Case("large-status", "the status of 12,500 nodes, as processor time", _run)
