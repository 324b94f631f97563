"""The environment variables of a worker (contract section 2), and the preloading of what has those of all workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping

from rallypoint.agent.spec import Worker, WorkerGroup, WorkerSpec
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger
from rallypoint.failures.record import VARIABLE as ERROR_FILE_VARIABLE
from rallypoint.notices import STANDBY_VARIABLE
from rallypoint.notices import VARIABLE as NOTICES_VARIABLE
from rallypoint.workers.context import macros

if TYPE_CHECKING:
    from rallypoint.workers.preload.client import PreloadManager
    from rallypoint.workers.reaper.client import ReaperClient

log = get_logger(__name__)


def worker_environment(
    group: WorkerGroup, worker: Worker, constant: Mapping[str, str], agent_environment: Mapping[str, str]
) -> dict[str, str]:
    """The variables that are added to the agent's environment for one worker.

    Args:
        group: the group, with its place in the round.
        worker: the worker, with its ranks.
        constant: what all workers have, `constant_environment`.
        agent_environment: the agent's own environment.
    """
    spec = group.spec
    numbers: dict[str, object] = {
        **constant,
        "LOCAL_RANK": worker.local_rank,
        "RANK": worker.global_rank,
        "GROUP_RANK": group.group_rank,
        "ROLE_RANK": worker.role_rank,
        "WORLD_SIZE": worker.world_size,
        "GROUP_WORLD_SIZE": group.group_world_size,
        "ROLE_WORLD_SIZE": worker.role_world_size,
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": group.master_port,
        "TORCHELASTIC_RESTART_COUNT": group.restarts,
    }
    environment = {name: str(value) for name, value in numbers.items()}
    if spec.virtual_local_rank:
        from rallypoint.base.devices import one_gpu_per_worker

        environment["LOCAL_RANK"] = "0"
        environment |= one_gpu_per_worker(agent_environment, spec.local_world_size)[worker.local_rank]
    if group.notices:
        environment[NOTICES_VARIABLE] = group.notices
    for source in group.variable_sources:
        environment.update(source.variables(worker, environment))
    return environment


def constant_environment(spec: WorkerSpec, agent_environment: Mapping[str, str]) -> dict[str, str]:
    """The variables among these that are the same for all workers of this node in all rounds.

    Args:
        spec: the spec of the workers.
        agent_environment: the agent's own environment.
    """
    constants: dict[str, object] = {
        "ROLE_NAME": spec.role,
        "LOCAL_WORLD_SIZE": spec.local_world_size,
        "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
        "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": spec.rdzv_handler.use_agent_store,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": agent_environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
        # So that SIGSEGV, and the SIGABRT of a stop that takes too long, leave the stacks of all threads.
        "PYTHONFAULTHANDLER": agent_environment.get("PYTHONFAULTHANDLER", 1),
    }
    if spec.features.hangs.flight_recorder:
        from rallypoint.agent.features.flight_recorder import constant_variables

        constants.update(constant_variables(agent_environment))
    if spec.local_world_size == 1 or spec.virtual_local_rank:
        constants["LOCAL_RANK"] = 0
    if "OMP_NUM_THREADS" in agent_environment:
        constants["OMP_NUM_THREADS"] = agent_environment["OMP_NUM_THREADS"]
    return {name: str(value) for name, value in constants.items()}


# Preloading

_PER_WORKER = frozenset(
    (
        *("LOCAL_RANK", "RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_TIMER_FILE"),
        *(NOTICES_VARIABLE, STANDBY_VARIABLE, ERROR_FILE_VARIABLE),
    )
)
"""What a worker finds in its environment that is of no other, or of no other round."""


def preload_manager(
    group: WorkerGroup, reaper: ReaperClient, progress: Callable[[], bool] = lambda: False
) -> PreloadManager | None:
    """Begin to import what the spec wants imported ahead; None if that is nothing, or no workers could be forked.

    Args:
        group: the workers.
        reaper: what starts them.
        progress: whether the workers that run now have made progress.
    """
    spec = group.spec
    names = spec.features.recovery.preloaded
    if not names:
        return None
    if not isinstance(spec.entrypoint, str):
        log.warning("Workers start without preloading: they are functions, and --preload forks scripts only")
        return None
    from rallypoint.workers.preload.client import PreloadManager

    argv = [spec.entrypoint, *(str(each) for each in macros.substitute(spec.args, "0"))]
    constant = constant_environment(spec, os.environ)
    own = per_worker_variables(spec, constant).union(*(each.names for each in group.variable_sources))
    environ = {name: value for name, value in os.environ.items() if name not in own}
    environ |= constant
    starts = PreloadManager(names, argv, environ, own, spec.local_world_size, progress=progress)
    starts.ensure_zygote(reaper)
    return starts


def per_worker_variables(spec: WorkerSpec, constant: Collection[str]) -> frozenset[str]:
    """Names of the variables that each worker has of its own.

    Args:
        spec: what the workers are.
        constant: names of those that are the same for all of this node in all rounds.
    """
    from rallypoint.base.devices import VISIBLE, VISIBLE_ROCM

    others = {VISIBLE, VISIBLE_ROCM} if spec.virtual_local_rank and spec.local_world_size > 1 else set()
    if spec.features.hangs.flight_recorder:
        from rallypoint.observe.hangs.dumps import PER_WORKER

        others |= PER_WORKER
    return (_PER_WORKER | others) - {*constant}
