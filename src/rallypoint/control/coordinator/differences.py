"""Finds how a node that requests a place differs from its job. Pure.

Nodes may differ in their number of workers, their role, and how long they wait for others. Nodes of different roles may
run different programs.
"""

from __future__ import annotations

from rallypoint.control.membership.state import NodeInfo, Settings, State
from rallypoint.control.protocol.messages import ConfigDifference

_OPTIONS = (
    ("last_call_timeout", True),
    ("lease", True),
    ("min_healthy_time", True),
    ("restart_backoff", True),
    ("restart_backoff_max", True),
    ("same_failure_limit", True),
    ("notice_timeout", False),  # each agent notifies its own workers
)
"""Settings that `--rdzv-conf` sets, and whether the control plane's value applies."""


def differences(node_info: NodeInfo, own: Settings | None, state: State, job: Settings) -> tuple[ConfigDifference, ...]:
    """List how a node that requests a place differs from the nodes before it.

    `own` are the settings that the node was started with, None in the control plane's process; `job` are the settings
    in effect.
    """
    result: list[ConfigDifference] = []
    if own is not None and own.segment != job.segment:
        result.append(ConfigDifference("--segment=", str(own.segment), str(job.segment)))
    if own is not None and (own.min_nodes, own.max_nodes) != (job.min_nodes, job.max_nodes):
        result.append(ConfigDifference("--nnodes=", _range(own), _range(job)))
    # With a restart window, the settings contain the node's own value; the state's value grows with the failures.
    if own is not None and _budget(own, "N") != _budget(job, "N"):
        given = str(node_info.max_restarts)
        result.append(ConfigDifference("--max-restarts=", _budget(own, given), _budget(job, str(state.max_restarts))))
    elif not job.restart_window and 0 <= state.max_restarts != node_info.max_restarts >= 0:
        result.append(ConfigDifference("--max-restarts=", str(node_info.max_restarts), str(state.max_restarts)))
    program = state.programs.get(node_info.role, "")
    if program and node_info.program and node_info.program != program:
        result.append(ConfigDifference("the program ", node_info.program, program, job_value_applies=False))
    for name, holds in _OPTIONS if own is not None else ():
        ours, theirs = getattr(own, name), getattr(job, name)
        if ours != theirs:
            result.append(ConfigDifference(f"--rdzv-conf={name}=", f"{ours:g}", f"{theirs:g}", holds))
    return tuple(result)


def _budget(settings: Settings, otherwise: str) -> str:
    return f"{settings.restarts_in_window}/{settings.restart_window:g}s" if settings.restart_window else otherwise


def _range(settings: Settings) -> str:
    low, high = settings.min_nodes, settings.max_nodes
    return str(low) if low == high else f"{low}:{high}"
