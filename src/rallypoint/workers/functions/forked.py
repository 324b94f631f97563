"""Start method fork: each worker is a copy of the agent's process, made by multiprocessing.

The agent is the parent, so the reaper cannot find a worker's leftovers. Instead:

- if the agent's main thread started the worker, the kernel ends the worker with that thread (PR_SET_PDEATHSIG), which
lives as long as the agent. Otherwise, or if the kernel lacks this call, a thread in the worker waits for the agent to
end;
- a stop ends all processes below the workers and in their sessions. It cannot find processes that left their session
and lost their parents. If the agent gets SIGKILL, the workers' children are not found either.

The agent has threads that pump output and perhaps serve a store. They do not exist in the copy, and a lock that one of
them holds during the fork is never released there. So a function that needs what other threads of the agent have open
must use another start method. The copy keeps the agent's descriptors open until it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Any, TextIO

from rallypoint.base.kernel import always_readable
from rallypoint.base.open_process import open_process
from rallypoint.base.process_handle import ProcessHandle
from rallypoint.failures.record import record
from rallypoint.workers.functions.worker import call
from rallypoint.workers.process import ChildProcess, process_start_error
from rallypoint.workers.reaper.client import ExitStatus
from rallypoint.workers.reaper.protocol import open_null
from rallypoint.workers.stop import NoSweep, kill_trees

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # loaded here: in a copy of a process with threads, loading might hang


class ForkedProcess(ChildProcess):
    """A worker that is a copy of this process. It is reaped on release, so that its session id is not reused."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        environ: Mapping[str, str],
        payload: int,
        stdout: int | None,
        stderr: int | None,
        cpus: Collection[int],
        ignored: Collection[int] = (),
    ) -> None:
        """Start the worker, which writes the result of `function(*args)` into the payload. Otherwise like
        `ReaperClient.spawn`.

        The worker initially ignores the signals `ignored`.

        Raises:
            RallypointError: this machine has no resources for another process.
        """
        # Let none of our handlers run in the copy.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            is_main = threading.current_thread() is threading.main_thread()
            guard = partial(_die_with_main_thread if is_main else _die_with_agent, os.getpid())

            def run() -> None:
                for number in ignored:
                    signal.signal(number, signal.SIG_IGN)
                _become_worker(guard, [int(number) for number in mask], stdout, stderr)
                _apply_environment(environ, cpus)
                record(call)(function, args, payload)

            self._process = get_context("fork").Process(target=run)
            self._process.start()
            handle = _handle(self._process)
        except OSError as error:
            raise process_start_error("by fork", error) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        super().__init__(handle)

    def _exit_status(self) -> ExitStatus:
        try:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # this does not reap
        except OSError:  # multiprocessing already reaped it, and knows the code
            return ExitStatus(True, self._process.exitcode)
        if found is None:
            return ExitStatus(False, None)
        return ExitStatus(True, found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)

    def release(self) -> None:
        super().release()
        with contextlib.suppress(ValueError):  # already closed, or it does not end
            self._process.join(0)
            self._process.close()


class ForkedSweep(NoSweep):
    """Ends forked workers and their leftovers as far as /proc shows them; then nothing is left to wait for."""

    def __init__(self, processes: Collection[ChildProcess]) -> None:
        self._processes = processes

    def begin(self, seconds: float = 0.0, spared: Collection[int] = ()) -> None:
        """End all that can be found before returning, with this many seconds between SIGTERM and SIGKILL."""
        kill_trees(self._processes, [process.pid for process in self._processes if process.fileno() >= 0], seconds)


def _pid(process: BaseProcess) -> int:
    assert process.pid is not None
    return process.pid


def _handle(process: BaseProcess) -> ProcessHandle:
    try:
        return open_process(_pid(process))
    except ProcessLookupError:  # it was already reaped
        return ProcessHandle(_pid(process), always_readable())
    except OSError:
        process.kill()
        process.join()
        raise


def _become_worker(guard: Callable[[], None], mask: Sequence[int], stdout: int | None, stderr: int | None) -> None:
    """Initialize a copy; `guard` ensures that it is killed when the agent is gone."""
    os.setsid()
    guard()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, default)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    sys.stdout = _redirect(1, stdout, sys.stdout)
    sys.stderr = _redirect(2, stderr, sys.stderr)
    null = open_null()
    if null != 0:  # multiprocessing might have closed it
        os.dup2(null, 0)
        os.close(null)


def _apply_environment(environ: Mapping[str, str], cpus: Collection[int]) -> None:
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)
    if cpus:
        from rallypoint.base.numa import bind_this_process

        bind_this_process(frozenset(cpus))


def _redirect(target: int, fd: int | None, stream: TextIO) -> TextIO:
    """Replace a standard descriptor if `fd` is set. Returns the unbuffered stream that writes to it.

    If the agent's process replaced the stream (in a notebook or a test), the worker does not use the replacement.
    """
    if fd is None:
        return stream
    os.dup2(fd, target)
    if isinstance(stream, io.TextIOWrapper) and _number(stream) == target:
        stream.reconfigure(write_through=True)
        return stream
    binary = open(target, "wb", buffering=0, closefd=False)  # noqa: SIM115 - it stays open
    return io.TextIOWrapper(binary, errors="backslashreplace", write_through=True)


def _number(stream: TextIO) -> int:
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return -1


def _die_with_main_thread(agent: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent:
        os.kill(os.getpid(), signal.SIGKILL)


def _die_with_agent(agent: int) -> None:
    handle = open_process(agent)
    if os.getppid() != agent:  # the handle might be another process's
        os.kill(os.getpid(), signal.SIGKILL)

    def wait() -> None:
        poller = select.poll()
        poller.register(handle.fileno(), select.POLLIN)
        poller.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
