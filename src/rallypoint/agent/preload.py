"""Preloading for the workers of a spec."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

from rallypoint.agent.environment import constant_environment
from rallypoint.agent.spec import WorkerGroup, WorkerSpec
from rallypoint.base.devices import VISIBLE, VISIBLE_ROCM
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger
from rallypoint.notices import VARIABLE as NOTICES_VARIABLE
from rallypoint.workers.context import macros
from rallypoint.workers.logs.specs import ERROR_FILE_VARIABLE

if TYPE_CHECKING:
    from rallypoint.workers.preload.client import PreloadManager
    from rallypoint.workers.reaper.client import ReaperClient

log = get_logger(__name__)

_PER_WORKER = frozenset(
    (
        *("LOCAL_RANK", "RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_TIMER_FILE"),
        *(NOTICES_VARIABLE, ERROR_FILE_VARIABLE),
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
    names = spec.features.recovery.preload
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
    others = {VISIBLE, VISIBLE_ROCM} if spec.virtual_local_rank and spec.local_world_size > 1 else set()
    if spec.features.hangs.flight_recorder:
        from rallypoint.observe.hangs.dumps import PER_WORKER

        others |= PER_WORKER
    return (_PER_WORKER | others) - {*constant}
