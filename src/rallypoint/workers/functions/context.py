"""All workers of one start that are functions, as one object (contract section 6.1).

Laws:

1. Anything that cannot be passed to a worker is found before any worker is started.
2. A worker has succeeded when it has ended with exit code 0 and its return value is here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing import spawn, util
from typing import TYPE_CHECKING, Any

from rallypoint.base.errors import UserError
from rallypoint.logs.specs import LogsSpecs
from rallypoint.workers.context import PContext, ProcessOptions
from rallypoint.workers.functions.payload import NothingReturned, Payload, job_spec
from rallypoint.workers.process import AdoptedProcess, ChildProcess, WorkerProcess
from rallypoint.workers.reaper.client import ReaperClient
from rallypoint.workers.stop import SweepInProgress

if TYPE_CHECKING:
    from rallypoint.workers.functions.fork_server_client import ForkServerClient

START_METHODS = ("spawn", "fork", "forkserver")


class FunctionContext(PContext):
    """Workers that call a function, which `ProcessOptions.start_method` starts as multiprocessing would.

    Those of `fork` start without a reaper.

    Raises:
        UserError: there is no such start method.
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
            raise UserError(f"start_method={self.start_method!r} is none; use one of {', '.join(START_METHODS)}")
        self._forking = self.start_method == "fork"
        super().__init__(
            name, entrypoint, args, envs, logs_specs, log_line_prefixes, None if self._forking else reaper, options
        )
        self._function = entrypoint
        self._payloads: dict[int, Payload] = {}
        self._server: ForkServerClient | None = None

    def _prepare(self) -> None:
        if self._forking:
            return
        super()._prepare()
        method = self.start_method
        cpus = self._options.cpus(self.nprocs) if method == "forkserver" else [()] * self.nprocs
        for rank in range(self.nprocs):
            environ = {**os.environ, **self.envs[rank]} if method == "forkserver" else None
            self._payloads[rank] = payload = Payload()
            payload.pack(job_spec(self._function, method, rank, environ, cpus[rank]), self._function, self.args[rank])

    def _start_one(self, rank: int, stdout: int | None, stderr: int | None, cpus: Collection[int]) -> ChildProcess:
        how = {"spawn": self._spawned, "fork": self._forked, "forkserver": self._forked_by_server}
        return how[self.start_method](rank, stdout, stderr, cpus)

    def _spawned(self, rank: int, stdout: int | None, stderr: int | None, cpus: Collection[int]) -> ChildProcess:
        assert self._reaper is not None
        with self._payloads[rank].worker_channel() as channel:
            environ = {**os.environ, **self.envs[rank]}
            return WorkerProcess(
                self._reaper, _command("worker"), environ, stdout, stderr, cpus, stdin=channel.fileno()
            )

    def _forked(self, rank: int, stdout: int | None, stderr: int | None, cpus: Collection[int]) -> ChildProcess:
        from rallypoint.workers.functions.forked import ForkedProcess

        self._payloads[rank] = payload = Payload()
        environ = {**os.environ, **self.envs[rank]}
        ignored = self._options.ignored_signals
        return ForkedProcess(self._function, self.args[rank], environ, payload.fd, stdout, stderr, cpus, ignored)

    def _forked_by_server(
        self, rank: int, stdout: int | None, stderr: int | None, cpus: Collection[int]
    ) -> ChildProcess:
        from rallypoint.workers.functions.fork_server_client import ForkServerClient

        assert self._reaper is not None
        payload = self._payloads[rank]
        if self._server is None:
            mask = sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
            self._server = ForkServerClient(self._reaper, _command("fork_server", mask), payload.fd)
        with payload.worker_channel() as channel, open(os.devnull, "wb") as nowhere:
            out, err = (_descriptor_or(nowhere.fileno(), *each) for each in ((1, stdout), (2, stderr)))
            return AdoptedProcess(self._reaper, self._server.fork(channel, out, err))

    def start(self) -> None:
        try:
            super().start()
        finally:
            if self._server is not None:
                self._server.close()

    def _sweep(self) -> SweepInProgress:
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
        with contextlib.suppress(NothingReturned):  # it ended while it was being stopped
            return self._payloads[rank].result()
        return None

    def _finish(self) -> None:
        for rank, process in self._processes.items():
            if process.poll() == 0:
                self._value(rank)
        super()._finish()
        for payload in self._payloads.values():
            payload.close()


def _command(module: str, *arguments: object) -> list[str]:
    """A command that runs the main function of a file of this folder, in the interpreter multiprocessing would take."""
    path, package = list(map(str, sys.path)), __name__.rpartition(".")[0]
    program = f"import sys; sys.path[:] = {path!r}; from {package}.{module} import main; main{arguments!r}"
    flags: list[str] = getattr(util, "_args_from_interpreter_flags", list)()
    return [os.fsdecode(spawn.get_executable()), *flags, "-u", "-c", program]


def _descriptor_or(otherwise: int, standard: int, given: int | None) -> int:
    """The descriptor that was given, else the standard one if this process has it, else another."""
    if given is not None:
        return given
    try:
        os.fstat(standard)
    except OSError:
        return otherwise
    return standard
