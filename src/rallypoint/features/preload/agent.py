"""Forks workers from a process that imported slow modules (`--preload` and `--standby`)."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable

from rallypoint.agent.feature import Agent, Feature
from rallypoint.agent.sources import Preparation
from rallypoint.agent.spec import WorkerSpec
from rallypoint.base.log import get_logger
from rallypoint.failures.record import VARIABLE as ERROR_FILE_VARIABLE
from rallypoint.features.preload.client import PreloadManager
from rallypoint.notices import STANDBY_VARIABLE
from rallypoint.notices import VARIABLE as NOTICES_VARIABLE
from rallypoint.workers.context import ProcessOptions, macros
from rallypoint.workers.patched_start import as_patched
from rallypoint.workers.reaper.client import Command

log = get_logger(__name__)


class Preload(Feature, Preparation):
    """One agent's preloading. Workers to be forked wait until everything is imported."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._manager: PreloadManager | None = None

    @property
    def is_busy(self) -> bool:
        """Whether an import is in progress or about to begin."""
        return self._manager is not None and self._manager.busy

    @property
    def early_readers(self) -> Collection[str]:
        """Known modules that read a per-worker variable while being imported."""
        return () if self._manager is None else self._manager.read_too_early

    def preparations(self) -> Iterable[Preparation]:
        return (self,)

    def prepare(self) -> None:
        """Start to import, with the variables shared by all workers."""
        workers, spec = self.workers, self.workers.group.spec
        if not isinstance(spec.entrypoint, str):
            log.warning(
                "Workers will start without preloading: they are functions, but --preload works only for scripts"
            )
            return
        names, argv = spec.features.recovery.preloaded, [spec.entrypoint, *map(str, macros.substitute(spec.args, "0"))]
        constant = workers.constant_environment()
        sources = workers.group.variable_sources
        own = per_worker_variables(spec, constant).union(*(source.names for source in sources))
        environ = {name: value for name, value in os.environ.items() if name not in own} | constant
        ((patched, *_),), _ = as_patched([Command(argv)], environ)
        if patched != argv:
            log.warning(
                "Workers will start without preloading: a debugger or tracer changes their command and would not "
                "follow forks"
            )
            return
        self._manager = PreloadManager(names, argv, environ, own, spec.local_world_size, progress=workers.folder.made)
        self._manager.ensure_zygote(workers.ensure_reaper())
        workers.sources.append(self._manager)

    def preparing(self) -> bool:
        return self._manager is not None and self._manager.importing

    def process_options(self, options: ProcessOptions) -> ProcessOptions:
        if self._manager is None:
            return options
        self._manager.ensure_zygote(self.workers.ensure_reaper())
        return options._replace(fork=self._manager.start)

    def on_reaper_closed(self) -> None:
        if self._manager is not None:
            self._manager.close()


_PER_WORKER = frozenset(
    (
        *("LOCAL_RANK", "RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_TIMER_FILE"),
        *(NOTICES_VARIABLE, STANDBY_VARIABLE, ERROR_FILE_VARIABLE),
    )
)
"""Variables that differ between workers or between rounds."""


def per_worker_variables(spec: WorkerSpec, constant: Collection[str]) -> frozenset[str]:
    """Names of the per-worker variables.

    Args:
        spec: the description of the workers.
        constant: names of variables that are the same for all workers of this node in all rounds.
    """
    others: Collection[str] = ()
    if spec.virtual_local_rank and spec.local_world_size > 1:
        from rallypoint.base.devices import one_device_per_worker

        others = one_device_per_worker(os.environ, spec.local_world_size)[0]
    return (_PER_WORKER | {*others}) - {*constant}
