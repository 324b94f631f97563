"""The metrics of a node, from what its agent has counted. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rallypoint.observe.metric_names import Distribution, Family, Sample
from rallypoint.telemetry.agent_account import RECOVERY_BOUNDS, AgentReading
from rallypoint.telemetry.phases import NodePhase

_REASONS = ("failure", "lost", "departed", "gave_up", "drained", "requested", "forgotten")
_STARTED = (NodePhase.RUNNING, NodePhase.STOPPING)


class NodeReading(NamedTuple):
    """What an agent's parts say at one moment. `running` is how many of its `workers` run; `last_output` is when each
    has written something, by local rank, in epoch seconds, 0 where that is not known."""

    job: str
    node: str
    role: str
    backend: str
    uptime: float
    workers: int
    running: int
    remaining: int
    last_output: Sequence[float]


def node_families(node: NodeReading, counted: AgentReading) -> list[Family]:
    """The metrics of a node."""
    own = (node.job, node.node)
    values: Mapping[str, Mapping[tuple[str, ...], float]] = {
        "rallypoint_agent_info": {(node.role, node.backend): 1},
        "rallypoint_agent_uptime_seconds": {(): node.uptime},
        "rallypoint_group_rank": {(): counted.group_rank},
        "rallypoint_round": {(): counted.round},
        "rallypoint_rounds": {(): counted.rounds},
        "rallypoint_restarts": {(each,): counted.restarts.get(each, 0) for each in _REASONS},
        "rallypoint_hangs": {(): counted.hangs},
        "rallypoint_restarts_remaining": {(): node.remaining},
        "rallypoint_worker_failures": {(kind,): count for kind, count in {"exit_code": 0, **counted.failures}.items()},
        "rallypoint_workers_survived": {(): counted.survived},
        "rallypoint_workers": {(state,): count for state, count in _workers(node, counted.phase).items()},
        "rallypoint_phase": {(each.value,): float(each is counted.phase) for each in NodePhase},
        "rallypoint_phase_seconds": {(each.value,): seconds for each, seconds in counted.seconds.items()},
        "rallypoint_worker_last_output_timestamp_seconds": {
            (str(rank),): at for rank, at in enumerate(node.last_output) if at
        },
        "rallypoint_progress_step": {(): counted.step} if counted.step >= 0 else {},
        "rallypoint_progress_timestamp_seconds": {(): counted.progress_at} if counted.progress_at else {},
    }
    families = [
        Family(name, [Sample((*own, *labels), value) for labels, value in found.items()])
        for name, found in values.items()
    ]
    recoveries = Distribution(RECOVERY_BOUNDS, counted.recoveries, counted.recovery_seconds)
    return [*families, Family("rallypoint_recovery_seconds", [Sample(own, recoveries)])]


def _workers(node: NodeReading, phase: NodePhase) -> Mapping[str, int]:
    started = phase in _STARTED
    running = min(node.running, node.workers) if started else 0
    return {
        "waiting": 0 if started else node.workers,
        "running": running,
        "exited": node.workers - running if started else 0,
    }
