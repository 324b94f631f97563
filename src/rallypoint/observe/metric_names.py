"""All metrics: names, kinds, what they say, labels. `docs/reference/metrics.md` describes each. Pure.

Names go by Prometheus' conventions: one prefix, base units, `_total` for counters, `_seconds`, `_info`. Those with
`job_` are of a whole job, and are told where its coordinator is; the others are of one node, told by its agent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What kind of a metric it is."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """A metric. Counters are named without `_total`, which is what the text adds."""

    kind: Kind
    text: str
    labels: tuple[str, ...] = ()


class Distribution(NamedTuple):
    """A histogram's value: how many were at most each bound, the last of which is infinite; and their sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


class Sample(NamedTuple):
    """A value, with those of the labels in order."""

    labels: tuple[str, ...]
    value: float | Distribution


class Family(NamedTuple):
    """All samples of one metric."""

    name: str
    samples: Sequence[Sample]


_JOB = ("job_id",)
_NODE = ("job_id", "node")

METRICS: Mapping[str, Metric] = {
    "rallypoint_build_info": Metric(
        Kind.GAUGE, "Version of Rallypoint and of Python; always 1.", ("version", "python")
    ),
    # Of a job
    "rallypoint_jobs": Metric(Kind.GAUGE, "Jobs of this control plane, by phase.", ("phase",)),
    "rallypoint_job_info": Metric(
        Kind.GAUGE, "The job, and the coordinator that counts for it; always 1.", (*_JOB, "incarnation")
    ),
    "rallypoint_job_phase": Metric(Kind.GAUGE, "1 for the phase that the job is in, 0 for others.", (*_JOB, "phase")),
    "rallypoint_job_phase_duration_seconds": Metric(Kind.GAUGE, "Seconds that the phase has lasted.", _JOB),
    "rallypoint_job_round": Metric(Kind.GAUGE, "Number of the round that runs or forms.", _JOB),
    "rallypoint_job_rounds": Metric(Kind.COUNTER, "Rounds that have ended before the job did.", _JOB),
    "rallypoint_job_restarts": Metric(Kind.COUNTER, "Rounds that have ended, by reason.", (*_JOB, "reason")),
    "rallypoint_job_restarts_remaining": Metric(Kind.GAUGE, "Failures that the job survives yet.", _JOB),
    "rallypoint_job_nodes": Metric(Kind.GAUGE, "Nodes, by state.", (*_JOB, "state")),
    "rallypoint_job_nodes_min": Metric(Kind.GAUGE, "Nodes that a round needs.", _JOB),
    "rallypoint_job_nodes_max": Metric(Kind.GAUGE, "Nodes that a round may have.", _JOB),
    "rallypoint_job_nodes_missing": Metric(Kind.GAUGE, "Nodes that have to come until a round can begin.", _JOB),
    "rallypoint_job_workers": Metric(Kind.GAUGE, "Workers of the round that runs.", _JOB),
    "rallypoint_job_backoff_seconds": Metric(Kind.GAUGE, "Seconds for which the next round is still held back.", _JOB),
    # Of a node
    "rallypoint_agent_info": Metric(Kind.GAUGE, "The node's agent; always 1.", (*_NODE, "role", "backend")),
    "rallypoint_agent_uptime_seconds": Metric(Kind.GAUGE, "Seconds since the agent began.", _NODE),
    "rallypoint_group_rank": Metric(Kind.GAUGE, "The node's rank in its round; -1 without one.", _NODE),
    "rallypoint_round": Metric(Kind.GAUGE, "The round that the node was given a place in last; -1 before any.", _NODE),
    "rallypoint_rounds": Metric(Kind.COUNTER, "Rounds that the node was given a place in.", _NODE),
    "rallypoint_restarts": Metric(Kind.COUNTER, "Rounds of the node that have ended, by reason.", (*_NODE, "reason")),
    "rallypoint_hangs": Metric(Kind.COUNTER, "Hangs of the job that the node was told of.", _NODE),
    "rallypoint_restarts_remaining": Metric(
        Kind.GAUGE, "Failures that the job survives yet, as the node knows.", _NODE
    ),
    "rallypoint_worker_failures": Metric(
        Kind.COUNTER,
        "First failures of a round among the node's workers, by the signal or `exit_code`.",
        (*_NODE, "kind"),
    ),
    "rallypoint_workers_survived": Metric(
        Kind.COUNTER, "Workers that went on in their processes when a round had ended.", _NODE
    ),
    "rallypoint_workers": Metric(Kind.GAUGE, "Workers of the node, by state.", (*_NODE, "state")),
    "rallypoint_phase": Metric(Kind.GAUGE, "1 for the phase that the node is in, 0 for others.", (*_NODE, "phase")),
    "rallypoint_phase_seconds": Metric(
        Kind.COUNTER, "Seconds that the node was in a phase. All together are the agent's uptime.", (*_NODE, "phase")
    ),
    "rallypoint_recovery_seconds": Metric(
        Kind.HISTOGRAM, "Seconds from a failure's being seen to the start of the next round's workers.", _NODE
    ),
    "rallypoint_worker_last_output_timestamp_seconds": Metric(
        Kind.GAUGE, "When a worker has last written something, in epoch seconds.", (*_NODE, "local_rank")
    ),
    "rallypoint_progress_step": Metric(Kind.GAUGE, "The last step that the node's workers have told.", _NODE),
    "rallypoint_progress_timestamp_seconds": Metric(Kind.GAUGE, "When they did, in epoch seconds.", _NODE),
}
"""Every metric that is ever told."""
