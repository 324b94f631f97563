"""All metrics: names, kinds, help texts, labels. `docs/reference/metrics.md` describes each. Pure.

Names follow Prometheus' conventions: one prefix, base units, `_total` for counters, `_seconds`, `_info`. Those with
`job_` describe a whole job, and are exposed where its coordinator runs; the others describe one node, and are exposed
by its agent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """The type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """A metric. The names of counters lack `_total`, which the text format adds."""

    kind: Kind
    text: str
    labels: tuple[str, ...] = ()


class Distribution(NamedTuple):
    """A histogram's value: how many observations are at most each bound, the last of which is infinite; their sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


class Sample(NamedTuple):
    """A value, with the values of its labels, in order."""

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
        Kind.GAUGE, "The job and the coordinator that reports it; always 1.", (*_JOB, "incarnation")
    ),
    "rallypoint_job_phase": Metric(
        Kind.GAUGE, "1 for the current phase of the job, 0 for all others.", (*_JOB, "phase")
    ),
    "rallypoint_job_phase_duration_seconds": Metric(
        Kind.GAUGE, "Seconds since the job entered its current phase.", _JOB
    ),
    "rallypoint_job_round": Metric(Kind.GAUGE, "Number of the round that is running or forming.", _JOB),
    "rallypoint_job_rounds": Metric(Kind.COUNTER, "Rounds that ended before the job did.", _JOB),
    "rallypoint_job_restarts": Metric(Kind.COUNTER, "Rounds that ended, by reason.", (*_JOB, "reason")),
    "rallypoint_job_restarts_remaining": Metric(Kind.GAUGE, "Failures that the job can still survive.", _JOB),
    "rallypoint_job_nodes": Metric(Kind.GAUGE, "Nodes, by state.", (*_JOB, "state")),
    "rallypoint_job_nodes_min": Metric(Kind.GAUGE, "Minimum number of nodes in a round.", _JOB),
    "rallypoint_job_nodes_max": Metric(Kind.GAUGE, "Maximum number of nodes in a round.", _JOB),
    "rallypoint_job_nodes_missing": Metric(Kind.GAUGE, "Nodes that must still join before a round can begin.", _JOB),
    "rallypoint_job_workers": Metric(Kind.GAUGE, "Workers of the running round.", _JOB),
    "rallypoint_job_backoff_seconds": Metric(
        Kind.GAUGE, "Seconds until the restart back-off allows the next round.", _JOB
    ),
    # Of a node
    "rallypoint_agent_info": Metric(Kind.GAUGE, "The node's agent; always 1.", (*_NODE, "role", "backend")),
    "rallypoint_agent_uptime_seconds": Metric(Kind.GAUGE, "Seconds since the agent started.", _NODE),
    "rallypoint_group_rank": Metric(Kind.GAUGE, "Group rank of the node in its round; -1 if it has none.", _NODE),
    "rallypoint_round": Metric(
        Kind.GAUGE, "Number of the last round that the node took part in; -1 before the first.", _NODE
    ),
    "rallypoint_rounds": Metric(Kind.COUNTER, "Rounds that the node took part in.", _NODE),
    "rallypoint_restarts": Metric(Kind.COUNTER, "Rounds of the node that ended, by reason.", (*_NODE, "reason")),
    "rallypoint_hangs": Metric(Kind.COUNTER, "Hangs of the job that were reported to the node.", _NODE),
    "rallypoint_restarts_remaining": Metric(
        Kind.GAUGE, "Failures that the job can still survive, as known to the node.", _NODE
    ),
    "rallypoint_worker_failures": Metric(
        Kind.COUNTER,
        "Failures of the node's workers that were the first of their round, by signal or `exit_code`.",
        (*_NODE, "kind"),
    ),
    "rallypoint_workers_survived": Metric(
        Kind.COUNTER, "Workers that continued in the same process after a round ended.", _NODE
    ),
    "rallypoint_workers": Metric(Kind.GAUGE, "Workers of the node, by state.", (*_NODE, "state")),
    "rallypoint_phase": Metric(Kind.GAUGE, "1 for the current phase of the node, 0 for all others.", (*_NODE, "phase")),
    "rallypoint_phase_seconds": Metric(
        Kind.COUNTER, "Seconds that the node spent in each phase. They add up to the agent's uptime.", (*_NODE, "phase")
    ),
    "rallypoint_recovery_seconds": Metric(
        Kind.HISTOGRAM, "Seconds from the detection of a failure to the start of the next round's workers.", _NODE
    ),
    "rallypoint_worker_last_output_timestamp_seconds": Metric(
        Kind.GAUGE, "Time at which a worker last wrote output, in epoch seconds.", (*_NODE, "local_rank")
    ),
    "rallypoint_progress_step": Metric(Kind.GAUGE, "Last step that the node's workers reported.", _NODE),
    "rallypoint_progress_timestamp_seconds": Metric(
        Kind.GAUGE, "Time at which they reported it, in epoch seconds.", _NODE
    ),
}
"""All metrics."""
