"""All function workers of one start, as one object (contract section 6.1).

Laws:

1. An object that cannot be passed to a worker is found before any worker starts.
2. A worker succeeded if it exited with 0 and its return value arrived.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from multiprocessing import spawn, util
from typing import TYPE_CHECKING, Any

from rallypoint.base.errors import UserError
from rallypoint.workers.context import PContext, ProcessOptions, WorkerStart
from rallypoint.workers.functions.worker import NothingReturned, Payload, main_module_of
from rallypoint.workers.logs.specs import LogsSpecs
from rallypoint.workers.process import ChildProcess, WorkerProcess
from rallypoint.workers.reaper.client import ReaperClient

if TYPE_CHECKING:
    from rallypoint.workers.stop import NoSweep

START_METHODS = ("spawn", "fork", "forkserver")


class FunctionContext(PContext):
    """Workers that call a function, started with `ProcessOptions.start_method`. `fork` needs no reaper.

    Raises:
        UserError: the start method is unknown.
    """

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any],
        args: Mapping[int, Sequence[Any]],
        envs: Mapping[int, Mapping[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
        reaper: ReaperClient | None = None,
        options: ProcessOptions | None = None,
    ) -> None:
        options = options or ProcessOptions()
        self.start_method = options.start_method
        if self.start_method not in START_METHODS:
            raise UserError(
                f"start_method={self.start_method!r} is not a start method; use one of {', '.join(START_METHODS)}"
            )
        self._forking = self.start_method == "fork"
        super().__init__(
            name, entrypoint, args, envs, logs_specs, log_line_prefixes, None if self._forking else reaper, options
        )
        self._function = entrypoint
        self._payloads: dict[int, Payload] = {}

    def _prepare(self) -> None:
        if self._forking:
            return
        super()._prepare()
        for rank in range(self.nprocs):
            self._payloads[rank] = payload = Payload()
            module = main_module_of(self._function, self.start_method, rank)
            payload.pack(module, self._function, self.args[rank])

    def _start_each(self, starts: Sequence[WorkerStart]) -> Iterator[tuple[int, ChildProcess]]:
        for start in starts:
            yield start.rank, self._start_one(*start)

    def _start_one(self, rank: int, stdout: int | None, stderr: int | None, cpus: Collection[int]) -> ChildProcess:
        environ = {**os.environ, **self.envs[rank]}
        if self._forking:
            from rallypoint.workers.functions.forked import ForkedProcess

            self._payloads[rank] = payload = Payload()
            ignored = self._options.ignored_signals
            return ForkedProcess(self._function, self.args[rank], environ, payload.fd, stdout, stderr, cpus, ignored)
        assert self._reaper is not None
        with self._payloads[rank].worker_channel() as channel:
            return WorkerProcess(self._reaper, _command(), environ, stdout, stderr, cpus, stdin=channel.fileno())

    def _sweep(self) -> NoSweep:
        if not self._forking:
            return super()._sweep()
        from rallypoint.workers.functions.forked import ForkedSweep

        return ForkedSweep(self._processes.values())

    def _failure_reason(self, rank: int, exitcode: int) -> str:
        if exitcode:
            return ""
        try:
            self._payloads[rank].result()
        except NothingReturned as error:
            return str(error)
        return ""

    def _value(self, rank: int) -> Any:
        with contextlib.suppress(NothingReturned):  # it ended during a stop
            return self._payloads[rank].result()
        return None

    def _finish(self) -> None:
        for rank, process in self._processes.items():
            if process.poll() == 0:
                self._value(rank)
        super()._finish()
        for payload in self._payloads.values():
            payload.close()


def _command() -> list[str]:
    """The command that runs `worker.main` with the interpreter that multiprocessing would use."""
    path, package = list(map(str, sys.path)), __name__.rpartition(".")[0]
    program = f"import sys; sys.path[:] = {path!r}; from {package}.worker import main; main()"
    flags: list[str] = getattr(util, "_args_from_interpreter_flags", list)()
    return [os.fsdecode(spawn.get_executable()), *flags, "-u", "-c", program]
