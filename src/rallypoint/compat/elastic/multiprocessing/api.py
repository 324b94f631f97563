"""In the place of `torch.distributed.elastic.multiprocessing.api`.

Contexts that a program starts by itself handle this process's signals, as torch's do: while one of them is open, each
signal that `TORCHELASTIC_SIGNALS_TO_HANDLE` names raises `SignalException` in the main thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from rallypoint.base.errors import SignalException
from rallypoint.base.poll import until_readable
from rallypoint.compat.elastic.multiprocessing.signal_handling import (
    install_handlers,
    restore_handlers,
    signal_wakeup,
)
from rallypoint.compat.reexports import reexports_of
from rallypoint.failures.failure import ProcessFailure
from rallypoint.logs.specs import DefaultLogsSpecs, LogsDest, LogsSpecs, Std, to_map
from rallypoint.workers import context
from rallypoint.workers.context import PContext, ProcessOptions, RunProcsResult
from rallypoint.workers.functions.context import FunctionContext

if TYPE_CHECKING:
    from rallypoint.base.numa import NumaOptions

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "PContext",
    "ProcessFailure",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
    "get_std_cm",
    "start_processes",
    "to_map",
]

__getattr__ = reexports_of(__name__)


class _HandlingSignals(PContext):
    """Handles the signals of this process from its start to its end."""

    _handles = False

    def start(self) -> None:
        self._handles = self._handles or install_handlers()
        super().start()

    def _sleep(self, seconds: float) -> None:
        with signal_wakeup() as wakeups:
            until_readable([*self.exit_fds(), *wakeups], seconds)

    def _finish(self) -> None:
        super()._finish()
        if self._handles:
            self._handles = False
            restore_handlers()


class SubprocessContext(_HandlingSignals, context.SubprocessContext):
    """Workers that are commands, made with torch's arguments; see `start_processes` for what they mean."""

    def __init__(
        self,
        name: str,
        entrypoint: str,
        args: Mapping[int, Sequence[Any]],
        envs: Mapping[int, Mapping[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
        numa_options: NumaOptions | None = None,
        duplicate_stdout_filters: Sequence[str] | None = None,
        duplicate_stderr_filters: Sequence[str] | None = None,
    ) -> None:
        options = ProcessOptions(numa_options, duplicate_stdout_filters, duplicate_stderr_filters)
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes, options=options)


class MultiprocessContext(_HandlingSignals, FunctionContext):
    """Workers that are functions, made with torch's arguments; see `start_processes` for what they mean."""

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any],
        args: Mapping[int, Sequence[Any]],
        envs: Mapping[int, Mapping[str, str]],
        start_method: str,
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
        numa_options: NumaOptions | None = None,
        duplicate_stdout_filters: Sequence[str] | None = None,
        duplicate_stderr_filters: Sequence[str] | None = None,
    ) -> None:
        options = ProcessOptions(numa_options, duplicate_stdout_filters, duplicate_stderr_filters, start_method)
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes, options=options)


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: Mapping[int, Sequence[Any]],
    envs: Mapping[int, Mapping[str, str]],
    logs_specs: LogsSpecs,
    log_line_prefixes: Mapping[int, str] | None = None,
    start_method: str = "spawn",
    numa_options: NumaOptions | None = None,
    duplicate_stdout_filters: Sequence[str] | None = None,
    duplicate_stderr_filters: Sequence[str] | None = None,
) -> PContext:
    """Start one process for each local rank; see `PContext`.

    Until all are done or `close` is called, a signal to this process raises SignalException in its main thread.
    """
    extras = (numa_options, duplicate_stdout_filters, duplicate_stderr_filters)
    made: PContext
    if isinstance(entrypoint, str):
        made = SubprocessContext(name, entrypoint, args, envs, logs_specs, log_line_prefixes, *extras)
    else:
        made = MultiprocessContext(name, entrypoint, args, envs, start_method, logs_specs, log_line_prefixes, *extras)
    made.start()
    return made


def get_std_cm(std_rd: str, redirect_fn: Callable[[str], AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """What `redirect_fn` makes of the file `std_rd`, or a context that does nothing where none is named."""
    return redirect_fn(std_rd) if std_rd else nullcontext()
