"""What an agent shows of itself: the block of a complete round in the log, and the status of the health check."""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.agent.spec import WorkerGroup
from rallypoint.rendezvous.messages import Placement


def round_block(group: WorkerGroup, restarts: int) -> str:
    """The lines about a complete round."""
    rows = {
        "restart_count": restarts,
        "master_addr": group.master_addr,
        "master_port": group.master_port,
        "group_rank": group.group_rank,
        "group_world_size": group.group_world_size,
        "local_ranks": [each.local_rank for each in group.workers],
        "role_ranks": [each.role_rank for each in group.workers],
        "global_ranks": [each.global_rank for each in group.workers],
        "role_world_sizes": [each.role_world_size for each in group.workers],
        "global_world_sizes": [each.world_size for each in group.workers],
        "event_log_handler": group.spec.event_log_handler,
    }
    return "\n".join(f"  {name}={value}" for name, value in rows.items())


def status(
    group: WorkerGroup, placement: Placement | None, restarts: int, remaining_restarts: int
) -> Mapping[str, object]:
    """What the health check shows of an agent."""
    return {
        "run_id": group.spec.rdzv_handler.get_run_id(),
        "role": group.spec.role,
        "state": group.state.value,
        "round": None if placement is None else placement.round,
        "restarts": restarts,
        "remaining_restarts": remaining_restarts,
        "group_rank": group.group_rank,
        "group_world_size": group.group_world_size,
        "workers": [
            {"local_rank": each.local_rank, "global_rank": each.global_rank, "pid": each.id} for each in group.workers
        ],
    }
