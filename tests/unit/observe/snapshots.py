"""Snapshots of jobs, made by hand."""

from __future__ import annotations

from typing import Any

from rallypoint.control.membership.state import Ledger
from rallypoint.control.protocol.messages import NodeReport
from rallypoint.control.protocol.observation import (
    EventKind,
    FailureView,
    JobEvent,
    NodeState,
    NodeView,
    Phase,
    Snapshot,
)
from rallypoint.failures.cause import Cause

LONG = "worker-0123456789.rack-17.row-4.cluster.example.org"
CAUSE = Cause(3, 1, "b", 42, -9, "Signal 9 (SIGKILL)", "", 1e9, "")


def node(number: int, **fields: Any) -> NodeView:
    """A node of a round that runs, with two workers."""
    report = NodeReport(4, (10 * number, 10 * number + 1), progress=7 + number, steps=(7 + number, 7 + number))
    view = NodeView(f"n{number} (rank {number})", f"n{number}", f"10.0.0.{number}", 7, NodeState.PARTICIPANT, True)
    return view._replace(silent_for=0.5, group_rank=number, first_rank=2 * number, workers=2, report=report)._replace(
        **fields
    )


def event(number: int, text: str, seconds_ago: float = 1.0) -> JobEvent:
    """Something that has happened."""
    return JobEvent(number, seconds_ago, EventKind.ROUND_ENDED, 4, text)


def snapshot(phase: Phase = Phase.RUNNING, nodes: int = 2, **fields: Any) -> Snapshot:
    """A job of so many nodes, two of which it needs."""
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
        nodes=tuple(node(number) for number in range(nodes)),
        ended_rounds=Ledger(failures=1),
        max_restarts=3,
        backoff=0.0,
        failures=(FailureView(30.0, 3, "n1 (rank 1)", "n1", 3, 1, 42, -9, f"rank 3 on {LONG} got Signal 9 (SIGKILL)"),),
        events=(event(1, "round 3 ended: n1 (rank 1): a worker failed"), event(2, "round 4 started with 2 nodes")),
    )
    return made._replace(**fields)
