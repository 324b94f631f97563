"""All metrics, one row per metric with name, kind, help text, labels and value. `docs/reference/metrics.md` describes
them. Pure.

Names follow Prometheus' conventions: one prefix, base units, `_total` for counters, `_seconds`, `_info`. Metrics with
`job_` describe a whole job, and its coordinator exposes them. The others describe one node, and its agent exposes them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

from rallypoint.base.errors import RallypointError
from rallypoint.base.version import __version__
from rallypoint.control.membership.state import Outcome
from rallypoint.observe.status import NODE_STATES
from rallypoint.observe.telemetry import agent_events as events
from rallypoint.observe.telemetry.agent_events import NodePhase, PhaseClock
from rallypoint.observe.watching.messages import JobPhase, JobSummary, Snapshot

RECOVERY_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""The upper bounds in the histogram of recoveries, in seconds."""
_FAILURES = ("failure", "lost")
"""Reasons for a round to end after which the recovery is timed."""


class AgentReading(NamedTuple):
    """An agent's counts. `recoveries` are cumulative, by `RECOVERY_BOUNDS` and infinity."""

    phase: NodePhase
    seconds: Mapping[NodePhase, float]
    round: int
    rounds: int
    group_rank: int
    restarts: Mapping[str, int]
    failures: Mapping[str, int]
    recoveries: tuple[int, ...]
    recovery_seconds: float
    step: int
    progress_at: float
    """The time of the last progress in epoch seconds; 0 for none."""
    hangs: int = 0
    survived: int = 0
    """How often a worker continued in its process when a round ended."""


class AgentAccount:
    def __init__(self) -> None:
        self._clock = PhaseClock(0.0)
        self._round = -1
        self._rounds = 0
        self._group_rank = -1
        self._restarts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._recoveries = [0] * (len(RECOVERY_BOUNDS) + 1)
        self._recovery_seconds = 0.0
        self._failed_at: float | None = None
        """When a failure was noticed that has no recovery yet."""
        self._step = -1
        self._progress_at = 0.0
        self._hangs = 0
        self._survived = 0

    def count(self, event: events.AgentEvent) -> None:
        match event:
            case events.PhaseBegan():
                self._clock.enter(event.phase, event.elapsed, event.seconds)
            case events.RoundStarted():
                self._round, self._group_rank = event.round, event.group_rank
                self._rounds += 1
            case events.WorkerFailed(failure=failure):
                self._failures[failure_kind(failure.exit_code)] += 1
                self._saw_failure(event.elapsed)
            case events.RoundOver():
                self._restarts[event.reason] += 1
                self._group_rank = -1
                if event.reason in _FAILURES:
                    self._saw_failure(event.elapsed)
            case events.WorkersStarted():
                self._recovered(event.elapsed)
                self._survived += len(event.survived)
            case events.ProgressMade():
                self._step = max(self._step, event.step)
                self._progress_at = event.time - event.age
            case events.HangReported():
                self._hangs += 1
            case _:
                pass

    def read(self, elapsed: float) -> AgentReading:
        """The counts until `elapsed` seconds after the agent's start."""
        return AgentReading(
            phase=self._clock.phase,
            seconds=self._clock.seconds(elapsed),
            round=self._round,
            rounds=self._rounds,
            group_rank=self._group_rank,
            restarts=dict(self._restarts),
            failures=dict(self._failures),
            recoveries=tuple(accumulate(self._recoveries)),
            recovery_seconds=self._recovery_seconds,
            step=self._step,
            progress_at=self._progress_at,
            hangs=self._hangs,
            survived=self._survived,
        )

    def _saw_failure(self, elapsed: float) -> None:
        if self._failed_at is None:
            self._failed_at = elapsed

    def _recovered(self, elapsed: float) -> None:
        if self._failed_at is not None:
            seconds = max(0.0, elapsed - self._failed_at)
            self._recoveries[bisect_left(RECOVERY_BOUNDS, seconds)] += 1
            self._recovery_seconds += seconds
            self._failed_at = None


def failure_kind(exit_code: int) -> str:
    """Name the signal that ended a worker, such as SIGKILL; `exit_code` without a signal."""
    if exit_code >= 0:
        return "exit_code"
    from rallypoint.base.signals import signal_name

    return signal_name(-exit_code)


S = TypeVar("S")


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


COUNTER, GAUGE, HISTOGRAM = MetricKind


class Distribution(NamedTuple):
    """The value of a histogram: the number of observations up to each bound, the last infinite; and their sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


Value = float | Distribution
Values = Mapping[tuple[str, ...], Value]
"""Maps the values of a metric's labels to its value; a single entry for a metric without labels."""


class Metric(NamedTuple, Generic[S]):
    """A metric, computed from an `S`. The names of counters omit `_total`, which the text format adds."""

    kind: MetricKind
    name: str
    text: str
    labels: tuple[str, ...]
    values: Callable[[S], Value | Values]


class Sample(NamedTuple):
    """A value, with the values of its labels, in order."""

    labels: tuple[str, ...]
    value: Value


class Family(NamedTuple):
    metric: Metric[Any]
    samples: Sequence[Sample]


def _family(metric: Metric[S], described: Iterable[tuple[tuple[str, ...], S]]) -> Family:
    samples: list[Sample] = []
    for common, subject in described:
        values = metric.values(subject)
        by_labels = values if isinstance(values, Mapping) else {(): values}
        samples += [Sample((*common, *labels), value) for labels, value in by_labels.items()]
    return Family(metric, samples)


# A whole job, from its snapshot


def label(text: str) -> str:
    return text.replace(" ", "_")


def _restarts(job: Snapshot) -> Mapping[str, int]:
    ended = job.ended_rounds
    return {
        "failure": ended.failures,
        "lost": ended.lost,
        "departed": ended.departed,
        "drained": ended.drained,
        "requested": ended.requested,
    }


def _remaining(job: Snapshot) -> Values:
    return {} if job.max_restarts < 0 else {(): max(0, job.max_restarts - job.ended_rounds.failures)}


def _nodes(job: Snapshot) -> Values:
    return {(state,): getattr(job.totals, state) for state in NODE_STATES}


def _job(
    kind: MetricKind, name: str, text: str, values: Callable[[Snapshot], Value | Values], *labels: str
) -> Metric[Snapshot]:
    return Metric(kind, f"rallypoint_{name}", text, ("job_id", *labels), values)


JOB_METRICS = (
    _job(
        GAUGE,
        "job_info",
        "Job, and the coordinator that reports it; always 1.",
        lambda job: {(job.incarnation,): 1},
        "incarnation",
    ),
    _job(
        GAUGE,
        "job_phase",
        "1 for the current phase of the job, 0 for the others.",
        lambda job: {(label(phase),): float(phase is job.phase) for phase in JobPhase},
        "phase",
    ),
    _job(
        GAUGE,
        "job_phase_duration_seconds",
        "Seconds since the job entered its current phase.",
        lambda job: job.phase_for,
    ),
    _job(GAUGE, "job_round", "Number of the running or forming round.", lambda job: job.round),
    _job(COUNTER, "job_rounds", "Rounds that ended while the job continued.", lambda job: sum(_restarts(job).values())),
    _job(
        COUNTER,
        "job_restarts",
        "Rounds that ended while the job continued, by reason.",
        lambda job: {(reason,): count for reason, count in _restarts(job).items()},
        "reason",
    ),
    _job(GAUGE, "job_restarts_remaining", "Restarts left for failures.", _remaining),
    _job(GAUGE, "job_nodes", "Nodes of the job, by state.", _nodes, "state"),
    _job(GAUGE, "job_nodes_min", "Minimum number of nodes in a round.", lambda job: job.min_nodes),
    _job(GAUGE, "job_nodes_max", "Maximum number of nodes in a round.", lambda job: job.max_nodes),
    _job(GAUGE, "job_nodes_missing", "Nodes that must still join before a round can begin.", lambda job: job.missing),
    _job(
        GAUGE,
        "job_workers",
        "Workers in the running round.",
        lambda job: job.totals.workers,
    ),
    _job(
        GAUGE,
        "job_backoff_seconds",
        "Seconds until the back-off allows the next round.",
        lambda job: job.backoff,
    ),
)


def job_families(snapshots: Sequence[Snapshot]) -> list[Family]:
    return [_family(metric, [((snapshot.job,), snapshot) for snapshot in snapshots]) for metric in JOB_METRICS]


# One node, from its agent's counts

_REASONS = ("failure", "lost", "departed", "gave_up", "drained", "requested", "forgotten")
_STARTED = (NodePhase.RUNNING, NodePhase.STOPPING)


class NodeReading(NamedTuple):
    """The state of an agent's parts at one time. `running` counts those of its `workers` that are running.
    `last_output` is the time of each worker's last output by local rank, in epoch seconds, 0 if unknown.
    """

    job: str
    node: str
    role: str
    backend: str
    uptime: float
    workers: int
    running: int
    remaining: int
    last_output: Sequence[float]
    counted: AgentReading


def _workers(node: NodeReading) -> Values:
    started = node.counted.phase in _STARTED
    running = min(node.running, node.workers) if started else 0
    return {
        ("waiting",): 0 if started else node.workers,
        ("running",): running,
        ("exited",): node.workers - running if started else 0,
    }


def _node(
    kind: MetricKind, name: str, text: str, values: Callable[[NodeReading], Value | Values], *labels: str
) -> Metric[NodeReading]:
    return Metric(kind, f"rallypoint_{name}", text, ("job_id", "node", *labels), values)


NODE_METRICS = (
    _node(
        GAUGE,
        "agent_info",
        "Agent of the node; always 1.",
        lambda node: {(node.role, node.backend): 1},
        "role",
        "backend",
    ),
    _node(GAUGE, "agent_uptime_seconds", "Seconds since the agent started.", lambda node: node.uptime),
    _node(
        GAUGE,
        "group_rank",
        "Group rank of the node in its round; -1 outside a round.",
        lambda node: node.counted.group_rank,
    ),
    _node(
        GAUGE,
        "round",
        "Number of the node's last round; -1 before the first.",
        lambda node: node.counted.round,
    ),
    _node(COUNTER, "rounds", "Rounds that the node took part in.", lambda node: node.counted.rounds),
    _node(
        COUNTER,
        "restarts",
        "Rounds of the node that ended, by reason.",
        lambda node: {(reason,): node.counted.restarts.get(reason, 0) for reason in _REASONS},
        "reason",
    ),
    _node(COUNTER, "hangs", "Hangs of the job reported to the node.", lambda node: node.counted.hangs),
    _node(
        GAUGE,
        "restarts_remaining",
        "Restarts left for failures, as known to the node.",
        lambda node: node.remaining,
    ),
    _node(
        COUNTER,
        "worker_failures",
        "Failures of the node's workers, only the first per round, by signal or `exit_code`.",
        lambda node: {(kind,): count for kind, count in {"exit_code": 0, **node.counted.failures}.items()},
        "kind",
    ),
    _node(
        COUNTER,
        "workers_survived",
        "Workers that continued in the same process after a round ended.",
        lambda node: node.counted.survived,
    ),
    _node(GAUGE, "workers", "Workers of the node, by state.", _workers, "state"),
    _node(
        GAUGE,
        "phase",
        "1 for the current phase of the node, 0 for the others.",
        lambda node: {(phase.value,): float(phase is node.counted.phase) for phase in NodePhase},
        "phase",
    ),
    _node(
        COUNTER,
        "phase_seconds",
        "Seconds that the node spent in each phase. The sum is the agent's uptime.",
        lambda node: {(phase.value,): seconds for phase, seconds in node.counted.seconds.items()},
        "phase",
    ),
    _node(
        HISTOGRAM,
        "recovery_seconds",
        "Seconds from the detection of a failure to the start of the next round's workers.",
        lambda node: Distribution(RECOVERY_BOUNDS, node.counted.recoveries, node.counted.recovery_seconds),
    ),
    _node(
        GAUGE,
        "worker_last_output_timestamp_seconds",
        "Time of the worker's last output, in epoch seconds.",
        lambda node: {(str(rank),): at for rank, at in enumerate(node.last_output) if at},
        "local_rank",
    ),
    _node(
        GAUGE,
        "progress_step",
        "Last step reported by the node's workers.",
        lambda node: {(): node.counted.step} if node.counted.step >= 0 else {},
    ),
    _node(
        GAUGE,
        "progress_timestamp_seconds",
        "Time of the last reported progress, in epoch seconds.",
        lambda node: {(): node.counted.progress_at} if node.counted.progress_at else {},
    ),
)


def node_families(node: NodeReading) -> list[Family]:
    return [_family(metric, [((node.job, node.node), node)]) for metric in NODE_METRICS]


# One server


def _jobs(jobs: Sequence[JobSummary]) -> Values:
    counts = Counter(job.phase for job in jobs)
    return {(label(phase),): counts[phase] for phase in JobPhase}


def _versions(_: None) -> Values:
    import platform

    return {(__version__, platform.python_version()): 1}


BUILD: Metric[None] = Metric(
    GAUGE, "rallypoint_build_info", "Version of Rallypoint and of Python; always 1.", ("version", "python"), _versions
)
JOBS: Metric[Sequence[JobSummary]] = Metric(
    GAUGE, "rallypoint_jobs", "Jobs at this control plane, by phase.", ("phase",), _jobs
)
ENDED: Metric[Mapping[Outcome, int]] = Metric(
    COUNTER,
    "rallypoint_jobs_ended",
    "Jobs that ended at this control plane, by outcome.",
    ("outcome",),
    lambda counts: {(outcome.value,): counts.get(outcome, 0) for outcome in Outcome},
)
METRICS: Mapping[str, Metric[Any]] = {
    metric.name: metric for metric in (BUILD, JOBS, ENDED, *JOB_METRICS, *NODE_METRICS)
}
"""All metrics."""


def build_family() -> Family:
    return _family(BUILD, [((), None)])


def jobs_families(jobs: Sequence[JobSummary], ended: Mapping[Outcome, int]) -> list[Family]:
    """The metrics of a control plane; `ended` counts jobs that ended since it started."""
    return [_family(JOBS, [((), jobs)]), _family(ENDED, [((), ended)])]


# The text for Prometheus; `prometheus-client` is imported only here

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(families: Sequence[Family]) -> tuple[str, bytes]:
    """The media type and the text. Raises RallypointError if `prometheus-client` is missing."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
        from prometheus_client.metrics_core import Metric as ClientMetric
        from prometheus_client.registry import Collector
    except ImportError as missing:
        raise RallypointError(
            "/metrics needs prometheus-client; run 'pip install prometheus-client' on this machine"
        ) from missing

    class Once(Collector):
        def collect(self) -> Iterator[ClientMetric]:
            for metric, samples in families:
                kind, name, text, labels, _ = metric
                if kind is HISTOGRAM:
                    histogram = HistogramMetricFamily(name, text, labels=labels)
                    for values, value in samples:
                        if isinstance(value, Distribution):
                            bounds = [*(f"{bound:g}" for bound in value.bounds), "+Inf"]
                            histogram.add_metric(values, [*zip(bounds, value.counts, strict=True)], value.sum)
                    yield histogram
                    continue
                family = (CounterMetricFamily if kind is COUNTER else GaugeMetricFamily)(name, text, labels=labels)
                for values, value in samples:
                    if not isinstance(value, Distribution):
                        family.add_metric(values, value)
                yield family

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Once())
    return CONTENT_TYPE, generate_latest(registry)
