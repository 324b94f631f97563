"""The state of a job, as the JSON of `rallyctl status --json` and `/status.json`. Pure: the time of day is passed in.

Version 1. Fields are added within a version, never renamed or removed; `docs/reference/status.md` describes each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rallypoint.observe.status_text import node_state
from rallypoint.observe.stragglers import steps_of
from rallypoint.protocol.messages import NodeReport
from rallypoint.protocol.observation import FailureView, JobEvent, JobSummary, NodeView, Snapshot

VERSION = 1
_MAX_STRAGGLERS = 100


def status_json(snapshot: Snapshot, now: float) -> str:
    """The text.

    Args:
        snapshot: of the job.
        now: the time of day of who shows it, in seconds since 1970. Moments are counted back from it.
    """
    return json.dumps(status_fields(snapshot, now), indent=2)


def status_fields(snapshot: Snapshot, now: float) -> dict[str, Any]:
    """The same as fields."""
    ended = snapshot.ended_rounds
    left = None if snapshot.max_restarts < 0 else max(0, snapshot.max_restarts - ended.failures)
    return {
        "version": VERSION,
        "job": snapshot.job,
        "phase": snapshot.phase.value,
        "since": moment(now - snapshot.phase_for),
        "phase_seconds": round(snapshot.phase_for, 3),
        "round": snapshot.round,
        "min_nodes": snapshot.min_nodes,
        "max_nodes": snapshot.max_nodes,
        "missing_nodes": snapshot.missing,
        "expected": list(snapshot.expected),
        "nodes": [_node(each) for each in snapshot.nodes],
        "stragglers": _stragglers(snapshot),
        "restarts": {
            "failures": ended.failures,
            "nodes_lost": ended.lost,
            "departures": ended.departed,
            "membership_changes": ended.drained,
            "requested": ended.requested,
            "left": left,
        },
        "backoff_seconds": round(snapshot.backoff, 3),
        "failures": [_failure(each, now) for each in snapshot.failures],
        "events": [_event(each, now) for each in snapshot.events],
        "detail": snapshot.detail,
    }


def jobs_json(jobs: Sequence[JobSummary]) -> str:
    """The text of a list of jobs."""
    return json.dumps(jobs_fields(jobs), indent=2)


def jobs_fields(jobs: Sequence[JobSummary]) -> dict[str, Any]:
    """The same as fields."""
    rows = [
        {"job": job, "phase": phase.value, "round": round_, "nodes": nodes, "max_nodes": most}
        for job, phase, round_, nodes, most in jobs
    ]
    return {"version": VERSION, "jobs": rows}


def moment(seconds: float) -> str:
    """A time of day as RFC 3339 has it, in UTC with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _known(number: float) -> float | None:
    return None if number < 0 else round(number, 3)


def _node(node: NodeView) -> dict[str, Any]:
    last = node.first_rank + node.workers
    return {
        "name": node.name,
        "host": node.host,
        "address": node.address,
        "pid": node.pid,
        "state": node_state(node),
        "connected": node.connected,
        "heard_seconds_ago": _known(node.silent_for),
        "group_rank": None if node.group_rank < 0 else node.group_rank,
        "global_ranks": list(range(node.first_rank, last)) if node.first_rank >= 0 else [],
        "local_world_size": node.workers,
        "role": node.role,
        "workers": None if node.report is None else _report(node.report),
    }


def _report(report: NodeReport) -> dict[str, Any]:
    return {
        "pids": list(report.pids),
        "progress": None if report.progress < 0 else report.progress,
        "progress_seconds_ago": _known(report.progress_age),
        "steps": [None if each < 0 else each for each in report.steps],
        "output_seconds_ago": [_known(each) for each in report.output_ages],
    }


def _stragglers(snapshot: Snapshot) -> dict[str, Any] | None:
    steps = steps_of(snapshot)
    if steps is None:
        return None
    behind = [each._asdict() for each in steps.behind[:_MAX_STRAGGLERS]]
    return {"median_step": steps.median, "ranks": steps.ranks, "behind": behind}


def _failure(failure: FailureView, now: float) -> dict[str, Any]:
    return {
        "time": moment(now - failure.seconds_ago),
        "round": failure.round,
        "node": failure.node,
        "host": failure.host,
        "rank": None if failure.rank < 0 else failure.rank,
        "local_rank": None if failure.local_rank < 0 else failure.local_rank,
        "pid": failure.pid or None,
        "exitcode": None if failure.rank < 0 else failure.exitcode,
        "message": failure.message,
    }


def _event(event: JobEvent, now: float) -> dict[str, Any]:
    return {
        "number": event.number,
        "time": moment(now - event.seconds_ago),
        "kind": event.kind.value.replace(" ", "_"),
        "round": event.round,
        "node": event.node,
        "text": event.text,
    }
