"""Processes that a program starts itself, with torch's arguments.

While one of these contexts is open, each signal in `TORCHELASTIC_SIGNALS_TO_HANDLE` raises `SignalException` in the
main thread. Laws:
- the last `restore_handlers` restores the previous handlers, but keeps handlers that others installed meanwhile;
- signals that our agent is currently handling are left to it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Any

from rallypoint.agent.signals import DEFAULT_SIGNALS, FORWARDED_SIGNALS, SIGNALS_VARIABLE, handled_signals
from rallypoint.base.errors import SignalException
from rallypoint.base.kernel import until_readable
from rallypoint.base.log import get_logger
from rallypoint.base.signals import SignalWakeup, is_posting_handler, signal_name
from rallypoint.workers import context
from rallypoint.workers.context import PContext, ProcessOptions
from rallypoint.workers.functions.context import FunctionContext
from rallypoint.workers.logs.specs import LogsSpecs

if TYPE_CHECKING:
    from rallypoint.base.numa import NumaOptions

__all__ = ["MultiprocessContext", "SubprocessContext", "get_std_cm", "start_processes"]

log = get_logger(__name__)

_previous: dict[int, Any] = {}
"""The previous handlers, by signal."""
_users = 0


class _HandlingSignals(PContext):
    """Handles the signals of this process from its start to its end."""

    _handles = False

    def start(self) -> None:
        self._handles = self._handles or install_handlers()
        super().start()

    def _sleep(self, fds: Sequence[int], seconds: float) -> None:
        with signal_wakeup() as wakeups:
            until_readable([*fds, *wakeups], seconds)

    def _finish(self) -> None:
        super()._finish()
        if self._handles:
            self._handles = False
            restore_handlers()


class SubprocessContext(_HandlingSignals, context.SubprocessContext):
    """Workers that are commands, created with torch's arguments; see `start_processes` for their meaning."""

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
    """Workers that are functions, created with torch's arguments; see `start_processes` for their meaning."""

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
    """Start one process per local rank; see `PContext`.

    Until all are done or `close` is called, a signal to this process raises SignalException in its main thread.
    """
    extras = (numa_options, duplicate_stdout_filters, duplicate_stderr_filters)
    pcontext: PContext
    if isinstance(entrypoint, str):
        pcontext = SubprocessContext(name, entrypoint, args, envs, logs_specs, log_line_prefixes, *extras)
    else:
        pcontext = MultiprocessContext(
            name, entrypoint, args, envs, start_method, logs_specs, log_line_prefixes, *extras
        )
    pcontext.start()
    return pcontext


def get_std_cm(std_rd: str, redirect_fn: Callable[[str], AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """The context that `redirect_fn` returns for the file `std_rd`; one that does nothing without a file."""
    return redirect_fn(std_rd) if std_rd else nullcontext()


# Signals


def install_handlers() -> bool:
    """Handle the signals in `TORCHELASTIC_SIGNALS_TO_HANDLE`, until `restore_handlers`.

    Returns:
        Whether they are handled: only the main thread can do this.
    """
    global _users
    if threading.current_thread() is not threading.main_thread():
        log.warning(
            "if a signal ends this process, the reaper will end its workers: only the main thread can handle signals"
        )
        return False
    _users += 1
    named = os.environ.get(SIGNALS_VARIABLE, DEFAULT_SIGNALS) != DEFAULT_SIGNALS
    for number in handled_signals():
        if not named and number in FORWARDED_SIGNALS:  # only an agent's default for schedulers
            continue
        if number not in _previous and not is_posting_handler(signal.getsignal(number)):
            try:
                _previous[number] = signal.signal(number, _raise)
            except OSError as error:
                log.warning("%s cannot be handled: %s", signal_name(number), error)
    return True


def restore_handlers() -> None:
    """Undo one `install_handlers`. Outside the main thread, the handlers stay until a later call there undoes them."""
    global _users
    _users -= 1
    if _users > 0 or threading.current_thread() is not threading.main_thread():
        return
    for number, old in _previous.items():
        if signal.getsignal(number) is _raise:
            signal.signal(number, old if old is not None else signal.SIG_DFL)
    _previous.clear()


@contextmanager
def signal_wakeup() -> Iterator[list[int]]:
    """Yields descriptors that wake the main thread when another thread gets a signal; none if not handling signals."""
    if not _users or threading.current_thread() is not threading.main_thread():
        yield []
        return
    wakeup = SignalWakeup()
    try:
        yield [wakeup.fileno()]
    finally:
        wakeup.close()


def _raise(number: int, _frame: FrameType | None) -> None:
    received = signal.Signals(number)
    raise SignalException(f"Process {os.getpid()} got signal: {received}", received)


def _reset_after_fork() -> None:
    """Forget the handlers' users: they are in the original process, not in this fork."""
    global _users
    _users = 0
    _previous.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
