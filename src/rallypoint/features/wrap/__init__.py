"""Runs some or all workers under a program (`--wrap`, `--wrap-ranks`): a profiler, a tracer, a debugger.

Imported only with the flag. A wrapped worker is started as `COMMAND python -u train.py`, again in each round, because
the command contains its ranks. What the agent does to a worker, it does to the wrapped program (`process`):

    started by the reaper, in a session of its own       the wrapper
    the worker's exit                                    the wrapper's, with the exit code of a program that failed
    signals, the stop and its stacks, stacks of a hang,  the program, found by its command line (`program`)
    drills, files that it writes, its pid in a status

A wrapped worker is not forked from a preloaded process, and no standby worker takes its place.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence

from rallypoint.agent.feature import Agent, Feature
from rallypoint.agent.options import Features
from rallypoint.agent.sources import Source
from rallypoint.base.errors import UsageError, naming
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger
from rallypoint.base.side_thread import start_thread
from rallypoint.features.wrap.command import Place, Ranks, Template, read_ranks, read_template
from rallypoint.features.wrap.process import Wrapped, WrappedProcess
from rallypoint.features.wrap.program import ProgramName
from rallypoint.workers.context import WorkerCommand

if TYPE_CHECKING:
    from rallypoint.base.process_handle import ProcessHandle
    from rallypoint.workers.context import PContext, ProcessOptions
    from rallypoint.workers.reaper.client import ReaperClient

log = get_logger(__name__)

_OWN = ("RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
"""Variables that distinguish one worker's program from others that run the same command."""


def check(own: Features, environ: Mapping[str, str], flag: str = "--wrap", ranks_flag: str = "--wrap-ranks") -> None:
    """Check the options. Raises UsageError if they cannot work.

    Args:
        own: all options.
        environ: the workers' environment.
        flag, ranks_flag: where the user set the two options, for messages.
    """

    tools, recovery = own.tools, own.recovery
    with naming(f"{ranks_flag}={tools.wrap_ranks}"):
        ranks = read_ranks(tools.wrap_ranks)
        if not tools.wrap:
            raise UsageError("it needs --wrap, which is not set; add --wrap, or remove this flag")
    with naming(f"{flag}={tools.wrap}"):
        program = read_template(tools.wrap, environ.keys()).words[0]
        if not {"%", "$"}.intersection(program) and shutil.which(program, path=environ.get("PATH")) is None:
            raise UsageError(f"{program} was not found or is not executable; use a path, or a name on the PATH")
        if recovery.standby:
            raise UsageError("standby workers cannot run in a wrapper; remove --standby or --wrap")
        if recovery.preload and not ranks.ranges:
            raise UsageError("wrapped workers cannot use --preload; choose the ranks to wrap with --wrap-ranks")


class Wrap(Feature, Source):
    """The wrapped workers of one agent."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        spec = self.workers.group.spec
        check(spec.features, os.environ)
        self._template: Template = read_template(spec.features.tools.wrap)
        self._ranks: Ranks = read_ranks(spec.features.tools.wrap_ranks)
        self._context: PContext | None = None
        self._processes: list[WrappedProcess] = []
        self._programs: list[int] = []
        """Their programs, as last seen."""
        if not isinstance(spec.entrypoint, str):
            raise UsageError(
                f"--wrap={spec.features.tools.wrap}: the workers are functions, but a wrapper can run only programs; "
                "remove this flag"
            )
        self._template.argv([spec.entrypoint, *map(str, spec.args)], Place(0, 0, "", 0))  # refused here if impossible

    def process_options(self, options: ProcessOptions) -> ProcessOptions:
        return options._replace(command=self._command)

    def before_start(self, context: PContext) -> None:
        self._context = context
        group, ranks = self.workers.group, self.workers.global_ranks()
        size = group.workers[0].world_size
        if group.group_rank == 0 and self._ranks.least > size:
            log.warning("--wrap-ranks lists none of the %d ranks of this round, so no worker is wrapped", size)
        for local_rank, rank in ranks.items():
            if self._template.in_python and self._ranks.include(rank):
                context.envs[local_rank].setdefault("PYTHONUNBUFFERED", "1")  # as `python -u` does for other workers

    def _command(self, local_rank: int, argv: Sequence[str]) -> WorkerCommand | None:
        """The command to start in place of this one; None if the worker is not wrapped."""
        group, context = self.workers.group, self._context
        rank = self.workers.global_ranks()[local_rank]
        assert context is not None
        assert group.placement is not None
        if not self._ranks.include(rank):
            return None
        place = Place(rank, local_rank, os.uname().nodename, group.placement.round)
        found = self._template.argv(argv, place)
        environ = context.envs[local_rank]
        wrapped = Wrapped(
            os.path.basename(found.argv[0]),
            ProgramName.of(found.argv),
            ProgramName.of(found.program),
            {name: environ[name] for name in _OWN if name in environ},
            context.error_files.get(local_rank, ""),
        )

        def process(reaper: ReaperClient, handle: ProcessHandle) -> WrappedProcess:
            made = WrappedProcess(reaper, handle, wrapped)
            self._processes = [*(known for known in self._processes if known.exitcode is None), made]
            # Use a thread, although nothing there can hang:
            #   1. the workers start, and for a tenth of a second this agent imports what it needs later;
            #   2. the program under py-spy fails at its first line. py-spy reaps it and ends with 0;
            #   3. the loop looks for the first time. Nothing shows any more that this worker failed.
            start_thread(made.watch, "rallypoint-wrap")  # without it, the program is looked up when needed
            return made

        return WorkerCommand(found.argv, process)

    def watchers(self) -> Iterable[Source]:
        return (self,)

    def step(self) -> None:
        """Publish where the programs are."""
        if (pids := [process.program_pid for process in self._processes]) != self._programs:
            self._programs = pids
            self.workers.watch_programs()
