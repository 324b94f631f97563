"""The metrics of a whole job, from its snapshot. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from rallypoint.base.version import __version__
from rallypoint.observe.metric_names import Family, Sample
from rallypoint.observe.status_text import node_state
from rallypoint.protocol.observation import JobSummary, NodeState, Phase, Snapshot

_NODE_STATES = (*(each.value for each in NodeState), "unreachable", "succeeded")


def label(text: str) -> str:
    """A word of ours as a label's value."""
    return text.replace(" ", "_")


def jobs_families(jobs: Iterable[JobSummary]) -> list[Family]:
    """The number of jobs."""
    counts = Counter(each.phase for each in jobs)
    return [Family("rallypoint_jobs", [Sample((label(each),), counts[each]) for each in Phase])]


def job_families(snapshots: Sequence[Snapshot]) -> list[Family]:
    """The metrics of these jobs."""
    return [
        Family(name, [sample for each in snapshots for sample in _samples(each, values(each))])
        for name, values in _OF_A_JOB.items()
    ]


def _samples(snapshot: Snapshot, values: Mapping[tuple[str, ...], float]) -> list[Sample]:
    return [Sample((snapshot.job, *labels), value) for labels, value in values.items()]


_Values = Callable[[Snapshot], Mapping[tuple[str, ...], float]]


def _one(value: Callable[[Snapshot], float]) -> _Values:
    return lambda snapshot: {(): value(snapshot)}


def _phases(snapshot: Snapshot) -> Mapping[tuple[str, ...], float]:
    return {(label(each),): float(each is snapshot.phase) for each in Phase}


def _restarts(snapshot: Snapshot) -> Mapping[tuple[str, ...], float]:
    return {(reason,): count for reason, count in restarts_by_reason(snapshot).items()}


def restarts_by_reason(snapshot: Snapshot) -> Mapping[str, int]:
    """The number of rounds that have ended before the job did, by reason."""
    ended = snapshot.ended_rounds
    return {
        "failure": ended.failures,
        "lost": ended.lost,
        "departed": ended.departed,
        "drained": ended.drained,
        "requested": ended.requested,
    }


def _remaining(snapshot: Snapshot) -> Mapping[tuple[str, ...], float]:
    if snapshot.max_restarts < 0:
        return {}
    return {(): max(0, snapshot.max_restarts - snapshot.ended_rounds.failures)}


def _nodes(snapshot: Snapshot) -> Mapping[tuple[str, ...], float]:
    counts = Counter(node_state(each) for each in snapshot.nodes)
    return {(each,): counts[each] for each in _NODE_STATES}


_OF_A_JOB: Mapping[str, _Values] = {
    "rallypoint_job_info": lambda snapshot: {(snapshot.incarnation,): 1},
    "rallypoint_job_phase": _phases,
    "rallypoint_job_phase_duration_seconds": _one(lambda each: each.phase_for),
    "rallypoint_job_round": _one(lambda each: each.round),
    "rallypoint_job_rounds": _one(lambda each: sum(restarts_by_reason(each).values())),
    "rallypoint_job_restarts": _restarts,
    "rallypoint_job_restarts_remaining": _remaining,
    "rallypoint_job_nodes": _nodes,
    "rallypoint_job_nodes_min": _one(lambda each: each.min_nodes),
    "rallypoint_job_nodes_max": _one(lambda each: each.max_nodes),
    "rallypoint_job_nodes_missing": _one(lambda each: each.missing),
    "rallypoint_job_workers": _one(lambda each: sum(node.workers for node in each.nodes if node.first_rank >= 0)),
    "rallypoint_job_backoff_seconds": _one(lambda each: each.backoff),
}


def build_family() -> Family:
    """The version of Rallypoint."""
    import platform

    return Family("rallypoint_build_info", [Sample((__version__, platform.python_version()), 1)])
