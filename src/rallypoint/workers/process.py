"""One worker process: started in a session of its own, watched through its pidfd, reaped last.

Laws:

1. How a process ended is read without reaping it: until `reap`, its pid stays taken, so that a signal to its group
   can hit nobody else. If somebody else has reaped it, the pid is not used any more.
2. What is in the worker's process group goes with it: `reap` ends the group before it lets go of the pid.
3. A constructor that raises leaves no process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence

from rallypoint.base.errors import RallypointError, UserError
from rallypoint.base.log import get_logger

log = get_logger(__name__)

UNKNOWN_EXIT = 255
"""What stands for an exit code that nobody can tell any more. It is no success."""

_WHY_THE_PROGRAM = {
    errno.ENOENT: "is not found; give a path, or a name on PATH",
    errno.E2BIG: "cannot be run: its arguments and environment are too long for the kernel (128 KiB for one, about a "
    "quarter of `ulimit -s` for all); hand large values over in a file",
    **dict.fromkeys(
        (errno.EACCES, errno.ENOEXEC, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG),
        "cannot be run: {reason}; give a path, or a name on PATH",
    ),
}
"""The errors of a start that are about the program, and what to say then. All others are about this machine."""

_WHERE_TO_LOOK = {
    errno.EAGAIN: "the limit of processes (`ulimit -u`, and `pids.max` of the control group)",
    errno.ENOMEM: "the memory that is free, and `memory.max` of the control group",
    errno.EMFILE: "this process's limit of open files (`ulimit -n`)",
    errno.ENFILE: "the machine's limit of open files (`sysctl fs.file-max`)",
}

_TO_GROUP = 4
"""PIDFD_SIGNAL_PROCESS_GROUP of Linux 6.9."""


class WorkerProcess:
    """A running or ended process of the user's program."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], stdout: int | None, stderr: int | None) -> None:
        """Start it.

        Args:
            argv: the program and its arguments; the program is looked up on PATH.
            env: its whole environment.
            stdout: the descriptor to write to; None to inherit ours.
            stderr: the same for standard error.

        Raises:
            UserError: there is no such program, it cannot be executed, or its arguments are too long.
            RallypointError: this machine has no room for another process, or its descriptor.
        """
        _hear_of_exits()
        try:
            self._popen = subprocess.Popen(
                list(argv), env=dict(env), stdout=stdout, stderr=stderr, start_new_session=True
            )
        except OSError as error:
            raise _start_error(argv[0], error) from None
        self.pid = self._popen.pid
        self.signalled = False
        """Whether it was sent a signal while, as far as was known, it still ran."""
        self._exitcode: int | None = None
        self._lost = False
        self._reaped = False
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:  # it has ended, and something else was quicker to reap it
            self._pidfd = os.eventfd(1)  # readable, as the descriptor of an ended process is
            self._lose()
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait()
            if isinstance(error, OSError):
                raise _start_error(argv[0], error) from None
            raise

    def fileno(self) -> int:
        """A descriptor that becomes readable when the process has ended."""
        return self._pidfd

    @property
    def seen_ended(self) -> bool:
        """Whether `poll` has found it ended."""
        return self._exitcode is not None

    def poll(self) -> int | None:
        """The exit code, -N for death by signal N; None while it runs. Does not reap.

        It is `UNKNOWN_EXIT` if something else in this program, or the kernel where SIGCHLD is ignored, has reaped it.
        """
        if self._exitcode is None:
            try:
                ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                self._lose()
            else:
                if ended is not None:
                    self._exitcode = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return self._exitcode

    def _lose(self) -> None:
        log.warning(
            "Process %d has ended and was reaped by something else (is SIGCHLD ignored, or every child waited for?); "
            "how it ended is unknown, so it counts as failed, with exit code %d",
            self.pid,
            UNKNOWN_EXIT,
        )
        self._lost = True
        self._exitcode = UNKNOWN_EXIT

    def signal(self, number: int) -> None:
        """Send a signal to the worker's process group. Nothing happens once it is reaped."""
        if self._reaped:
            return
        if self._exitcode is None:
            self.signalled = True
        if self._lost:  # the descriptor still means its group, and no other; an older kernel cannot do that
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, number, None, _TO_GROUP)
        else:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def reap(self) -> None:
        """End what is left of its group, and let go of the process, which must have ended.

        Idempotent, and after an exception in the middle of it (a ^C) it can be called again to finish.
        """
        assert self.poll() is not None, f"process {self.pid} still runs"
        self.signal(signal.SIGKILL)
        self._reaped = True
        self._popen.wait()
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)


def _hear_of_exits() -> None:
    """Take back an ignored SIGCHLD, which a shell can leave us: with it the kernel keeps no exit codes."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _start_error(program: str, error: OSError) -> RallypointError:
    number = error.errno or 0
    if number in _WHY_THE_PROGRAM:
        return UserError(f"the worker program {program!r} {_WHY_THE_PROGRAM[number].format(reason=error.strerror)}")
    where = _WHERE_TO_LOOK.get(number, "the limits of this process (`ulimit -a`) and of its control group")
    return RallypointError(f"no process could be started for {program!r}: {error.strerror or error}; look at {where}")
