"""Snapshots of jobs, made by hand."""

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
    """A node of a round that runs, with two workers."""
    report = NodeReport(4, (10 * number, 10 * number + 1), progress=7 + number, steps=(7 + number, 7 + number))
    view = NodeView(f"n{number} (rank {number})", f"n{number}", f"10.0.0.{number}", 7, MemberState.PARTICIPANT, True)
    return view._replace(silent_for=0.5, group_rank=number, first_rank=2 * number, workers=2, report=report)._replace(
        **fields
    )


def totals_of(nodes: Sequence[NodeView]) -> Totals:
    """What is counted over these nodes, if they are all."""
    reports = [each.report for each in nodes if each.report is not None]
    reached = [each.progress for each in reports if each.progress >= 0]
    counts: dict[str, Any] = Counter(node_state(each) for each in nodes)
    return Totals(
        **counts,
        quiet=sum(each.quiet for each in nodes),
        reported=len(reports),
        workers=sum(each.workers for each in nodes if each.first_rank >= 0),
        least_step=min(reached, default=-1),
        most_step=max(reached, default=-1),
        in_place_of=tuple(sorted({each.in_place_of for each in reports if each.in_place_of})),
        steps=steps_of(nodes),
    )


def steps_of(nodes: Sequence[NodeView]) -> Steps | None:
    """The steps of all ranks of these nodes that report theirs."""
    told = [
        Straggler(each.first_rank + local, each.name, step, 0)
        for each in nodes
        if each.report is not None and each.first_rank >= 0
        for local, step in enumerate(each.report.steps)
        if step >= 0
    ]
    if len(told) < 2:
        return None
    median = sorted(each.step for each in told)[len(told) // 2]
    late = sorted((each for each in told if each.step < median), key=lambda each: (each.step, each.rank))
    behind = tuple(each._replace(behind=median - each.step) for each in late[:100])
    return Steps(median, len(told), len(late), behind)


def event(number: int, text: str, seconds_ago: float = 1.0) -> JobEvent:
    """Something that has happened."""
    return JobEvent(number, seconds_ago, EventKind.ROUND_ENDED, 4, text)


def snapshot(phase: JobPhase = JobPhase.RUNNING, nodes: int | Sequence[NodeView] = 2, **fields: Any) -> Snapshot:
    """A job of so many nodes, or of these, two of which it needs."""
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
