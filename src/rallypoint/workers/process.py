"""One worker process: started by the reaper in its own session, watched and signalled through its handle.

Laws:

1. A worker is signalled through its handle, which cannot refer to another process. Its pid is for people.
2. A signal goes to the worker alone. The reaper handles the worker's descendants (`sweep`).
3. A constructor that raises leaves no process behind.
4. The reaper reports each exit once, so only one caller of `poll` asks it at a time. Callers may be on several threads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posix
import select
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from rallypoint.base.errors import RallypointError, ResourceError
from rallypoint.base.kernel import DeniedError, readable
from rallypoint.base.light_typing import TYPE_CHECKING, Protocol
from rallypoint.workers.reaper.client import Command, ExitStatus, ReaperClient, ReaperLost

if TYPE_CHECKING:
    from rallypoint.base.process_handle import ProcessHandle

UNKNOWN_EXIT = 255
"""Exit code of a process whose real exit code is lost. It does not count as success."""

_PROGRAM_ERRORS = {
    errno.ENOENT: "was not found; use a path, or a name on the PATH",
    errno.E2BIG: "cannot be run: its arguments and environment are too long for the kernel (128 KiB for one, about a "
    "quarter of `ulimit -s` for all); pass large values in a file",
    errno.EACCES: "cannot be run: Permission denied; check the permissions of its folders and of its interpreter, and "
    "that its file system is not mounted with noexec",
    **dict.fromkeys(
        (errno.ENOEXEC, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG),
        "cannot be run: {reason}; use a path, or a name on the PATH",
    ),
}
"""Start errors that are the program's fault, and their messages. All others are about this machine."""

_WHERE_TO_LOOK = {
    errno.EAGAIN: "the limit of processes (`ulimit -u`, and `pids.max` of the control group)",
    errno.ENOMEM: "the memory that is free, and `memory.max` of the control group",
    errno.EMFILE: "this process's limit of open files (`ulimit -n`)",
    errno.ENFILE: "the machine's limit of open files (`sysctl fs.file-max`)",
    **dict.fromkeys((errno.EPERM, errno.ENOSYS), "what a sandbox (the seccomp profile of the container) denies"),
}


class ChildProcess(ABC):
    """A process started for us, and how it ended.

    Args:
        handle: its handle; this object closes it.
    """

    def __init__(self, handle: ProcessHandle) -> None:
        self.pid = handle.pid
        self._handle = handle
        self.held_by_debugger = False
        """Whether the process ended but a debugger still holds it, so that its descriptor shows no further change.
        Without pidfds, also whether it is still running after its reaper was lost."""
        self.orphaned = False
        """Whether the process ended when its reaper was lost; only the reaper knew its exit status."""
        self.signalled = False
        """Whether the process received a signal to end while, as far as known, it was still running."""
        self.on_stacks: Callable[[], None] = lambda: None
        """Called before SIGABRT makes the process write its stacks."""
        self.stacks_wanted: Callable[[], bool] = lambda: False
        """Whether the process hangs and its stacks have not been collected. Then SIGABRT replaces a signal that would
        end it at once, provided that it writes its stacks on SIGABRT."""
        self.exitcode: int | None = None
        """The exit code, -N for death by signal N, once `poll` notices the end.

        `UNKNOWN_EXIT` if `orphaned` and not killed by us.
        """
        self.fault = ""
        """Why the process failed, if its exit code does not show this; set after it ends."""
        self.remark = ""
        """What a person should know about the exit code; set after the process ends."""
        self.ended_at = 0.0
        """When the end was noticed, on the monotonic clock."""
        self._killed = False
        self._collecting = threading.Lock()

    @property
    def program_pid(self) -> int:
        """Pid of the worker's program: this process, or one that it started for that."""
        return self.pid

    @property
    def program_code(self) -> int | None:
        """Exit code of a program that ended while this process, which started it, is still running."""
        return None

    def fileno(self) -> int:
        """A descriptor that becomes readable when the process ends."""
        return self._handle.fileno()

    def poll(self) -> int | None:
        """The exit code; None while the process is running."""
        if self.exitcode is None and self.fileno() >= 0 and readable(self.fileno()):
            # Law 4. Without the lock:
            #   1. the loop's thread and one that reports on a hang both find the descriptor readable;
            #   2. both ask the reaper, which reports the exit code once and forgets it;
            #   3. the second caller gets no exit code, and a worker that succeeded counts as failed.
            with self._collecting:
                if self.exitcode is None:
                    final, code = self._exit_status()
                    self.held_by_debugger = not final
                    if final:
                        self.ended_at = time.monotonic()
                        self.exitcode = UNKNOWN_EXIT if code is None else code
        return self.exitcode

    @abstractmethod
    def _exit_status(self) -> ExitStatus:
        """The exit status that the descriptor shows; not final if a debugger holds the process."""

    def signal(self, number: int) -> None:
        """Send the worker a signal to end it. Does nothing after it ended."""
        if self.exitcode is None:
            self.signalled = True
            if self.stacks_wanted() and self._would_write_stacks(number):
                number = signal.SIGABRT
            if number == signal.SIGABRT:
                self.on_stacks()
            self._killed |= number == signal.SIGKILL
            self.forward_signal(number)

    def _would_write_stacks(self, number: int) -> bool:
        """Whether SIGABRT would show where the process hangs, while this signal would end it at once."""
        from rallypoint.base.procfs import has_signal_handler, is_ended_by

        pid = self.program_pid
        return is_ended_by(pid, number) and has_signal_handler(pid, signal.SIGABRT)

    def forward_signal(self, number: int) -> None:
        """Forward a signal to the worker. Does nothing after it ended."""
        if self.fileno() >= 0 and self.exitcode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                self._handle.send_signal(number)

    def release(self) -> None:
        self._handle.close()


class _Polled(Protocol):
    @property
    def exitcode(self) -> int | None: ...

    def fileno(self) -> int: ...

    def poll(self) -> int | None: ...


def poll_all(processes: Iterable[_Polled]) -> None:
    """Poll all processes with one system call; then each has its `exitcode`."""
    awaited = {process.fileno(): process for process in processes if process.exitcode is None and process.fileno() >= 0}
    poller = select.poll()
    for fd in awaited:
        poller.register(fd, select.POLLIN)
    for fd, _ in poller.poll(0):
        awaited[fd].poll()


class AdoptedProcess(ChildProcess):
    """A child of the reaper that was started by a process below the reaper."""

    def __init__(self, reaper: ReaperClient, handle: ProcessHandle) -> None:
        super().__init__(handle)
        self._reaper = reaper

    def _exit_status(self) -> ExitStatus:
        try:
            return self._reaper.status(self.pid)
        except ReaperLost:
            if self._handle.outlives_reaper():
                return ExitStatus(False, None)
            self.orphaned = not self._killed
            return ExitStatus(True, -signal.SIGKILL if self._killed else None)


class WorkerProcess(AdoptedProcess):
    def __init__(
        self,
        reaper: ReaperClient,
        argv: Sequence[str],
        env: Mapping[str, str],
        stdout: int | None = None,
        stderr: int | None = None,
        cpus: Collection[int] = (),
        stdin: int | None = None,
    ) -> None:
        """Start one process with exactly this environment; see `Command` and `start_workers`."""
        (handle,) = start_workers(reaper, [Command(argv, {}, (stdin, stdout, stderr), cpus)], env)
        super().__init__(reaper, handle)


def start_workers(
    reaper: ReaperClient, commands: Sequence[Command], env: Mapping[str, str], *, excluded: bool = False
) -> list[ProcessHandle]:
    """Start all these commands or none, with these variables in each environment. `excluded`: see `spawn`.

    Raises:
        UserError: a program does not exist, cannot be executed, or its arguments are too long.
        ReaperLost: the reaper ended.
        RallypointError: this machine has no room for another process, or its descriptor.
    """
    # Cheap check whether a tool can have replaced the start of processes; the module examines it closely.
    if os.posix_spawn is not posix.posix_spawn or "subprocess" in sys.modules:
        from rallypoint.workers.patched_start import as_patched

        commands, env = as_patched(commands, env)
    try:
        return reaper.spawn(commands, env, excluded)
    except OSError as error:
        raise _start_error(commands[0].argv[0], error) from None


def _start_error(program: str, error: OSError) -> RallypointError:
    number = error.errno or 0
    if number in _PROGRAM_ERRORS:
        from rallypoint.base.errors import user_error

        why = _PROGRAM_ERRORS[number].format(reason=error.strerror)
        if number == errno.EACCES and os.path.isfile(program) and not os.access(program, os.X_OK):
            why = f"is not executable; run 'chmod +x {program}'"
        elif number == errno.EACCES and os.path.isdir(program):
            why = "is a folder; use the path of a program"
        return user_error(f"the worker program {program!r} {why}", error)
    return process_start_error(f"for {program!r}", error)


def process_start_error(what: str, error: OSError) -> ResourceError:
    """Create the error for a process that this machine cannot start; `what` names it."""
    where = _WHERE_TO_LOOK.get(error.errno or 0, "the limits of this process (`ulimit -a`) and of its control group")
    found = ResourceError(f"no process could be started {what}: {error.strerror or error}; check {where}")
    found.errno = error.errno
    return found


def is_shortage(error: BaseException) -> bool:
    """Whether an error means that this machine ran out of a resource that may be free again in a moment."""
    number = getattr(error, "errno", None)
    if number is not None:
        return number in _SHORTAGES
    is_resource = isinstance(error, (MemoryError, ResourceError)) and not isinstance(error, DeniedError)
    return is_resource or "can't start new thread" in str(error)


_SHORTAGES = frozenset(
    (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOSPC, errno.EDQUOT, errno.EUSERS)
)
