"""Snapshots of jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rallypoint.control.membership.state import Ledger
from rallypoint.control.protocol.messages import NodeReport
from rallypoint.failures.cause import Cause
from rallypoint.observe.status import node_state
from rallypoint.observe.watching.messages import (
    EventKind,
    FailureView,
    JobEvent,
    JobPhase,
    MemberState,
    NodeView,
    Snapshot,
    Steps,
    Straggler,
    Totals,
)

LONG = "worker-0123456789.rack-17.row-4.cluster.example.org"
CAUSE = Cause(3, 1, "b", 42, -9, "Signal 9 (SIGKILL)", "", 1e9, "")


def node(number: int, **fields: Any) -> NodeView:
    """A node with two workers in a running round."""
    report = NodeReport(4, (10 * number, 10 * number + 1), progress=7 + number, steps=(7 + number, 7 + number))
    view = NodeView(f"n{number} (rank {number})", f"n{number}", f"10.0.0.{number}", 7, MemberState.PARTICIPANT, True)
    known = {"silent_for": 0.5, "group_rank": number, "first_rank": 2 * number, "workers": 2, "report": report}
    return view._replace(**{**known, **fields})


def totals_of(nodes: Sequence[NodeView]) -> Totals:
    """The totals of a job with these nodes."""
    reports = [view.report for view in nodes if view.report is not None]
    reached = [report.progress for report in reports if report.progress >= 0]
    counts: dict[str, Any] = Counter(node_state(view) for view in nodes)
    return Totals(
        **counts,
        quiet=sum(view.quiet for view in nodes),
        reported=len(reports),
        workers=sum(view.workers for view in nodes if view.first_rank >= 0),
        least_step=min(reached, default=-1),
        most_step=max(reached, default=-1),
        in_place_of=tuple(sorted({report.in_place_of for report in reports if report.in_place_of})),
        steps=steps_of(nodes),
    )


def steps_of(nodes: Sequence[NodeView]) -> Steps | None:
    """The steps that ranks of these nodes report."""
    ranks = [
        Straggler(view.first_rank + local, view.name, step, 0)
        for view in nodes
        if view.report is not None and view.first_rank >= 0
        for local, step in enumerate(view.report.steps)
        if step >= 0
    ]
    if len(ranks) < 2:
        return None
    median = sorted(rank.step for rank in ranks)[len(ranks) // 2]
    late = sorted((rank for rank in ranks if rank.step < median), key=lambda rank: (rank.step, rank.rank))
    behind = tuple(rank._replace(behind=median - rank.step) for rank in late[:100])
    return Steps(median, len(ranks), len(late), behind)


def event(number: int, text: str, seconds_ago: float = 1.0) -> JobEvent:

    return JobEvent(number, seconds_ago, EventKind.ROUND_ENDED, 4, text)


def snapshot(phase: JobPhase = JobPhase.RUNNING, nodes: int | Sequence[NodeView] = 2, **fields: Any) -> Snapshot:
    """A job with these nodes, or this number of nodes, that needs two."""
    made = Snapshot(
        job="job",
        incarnation="inc",
        phase=phase,
        phase_for=61.0,
        round=4,
        min_nodes=2,
        max_nodes=4,
        missing=0,
        expected=(),
        nodes=(),
        not_shown=0,
        totals=Totals(),
        ended_rounds=Ledger(failures=1),
        max_restarts=3,
        backoff=0.0,
        failures=(FailureView(30.0, 3, "n1 (rank 1)", "n1", 3, 1, 42, -9, f"rank 3 on {LONG} got Signal 9 (SIGKILL)"),),
        events=(event(1, "round 3 ended: n1 (rank 1): a worker failed"), event(2, "round 4 started with 2 nodes")),
    )
    rows = [node(number) for number in range(nodes)] if isinstance(nodes, int) else nodes
    made = made._replace(nodes=tuple(rows), **fields)
    return made if "totals" in fields else made._replace(totals=totals_of(made.nodes))
