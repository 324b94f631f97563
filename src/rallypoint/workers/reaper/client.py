"""The agent's end of its reaper: starting it, sending it requests, and knowing when it is gone.

Laws:

1. `ReaperClient()` does not wait for the process to be ready; the first call does.
2. A call that is interrupted (an exception in a signal handler, a lost answer) breaks the connection, and the reaper
   then kills all that is below it: so no half-started worker is left, and each answer belongs to the last request.
3. One object represents one reaper and its supervisor. When either is gone, what they started is killed, calls raise
   `ReaperLost`, and a new object is needed.
4. No descriptor in here is 0, 1 or 2, even if this process was started without them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from socket import socket, socketpair

from rallypoint.base.errors import RallypointError, ResourceError
from rallypoint.base.kernel import check_kernel, denied_error
from rallypoint.base.light_typing import Any, NamedTuple
from rallypoint.base.log import get_logger
from rallypoint.base.poll import always_readable, readable
from rallypoint.base.signals import how_it_ended
from rallypoint.workers.reaper import protocol
from rallypoint.workers.reaper.encoding import (
    above_standard,
    encoded_arguments,
    encoded_environment,
    executable_candidates,
    standard_descriptors,
    worker_settings,
)

log = get_logger(__name__)

_BOOTSTRAP = """\
import sys
for name in ("rallypoint", "rallypoint.base", "rallypoint.workers", "rallypoint.workers.reaper"):
    package = sys.modules[name] = type(sys)(name)
    package.__path__ = [sys.argv[1] + name[10:].replace(".", "/")]
from rallypoint.workers.reaper.supervisor import main; main(sys.argv[2:])"""
"""Imports the program instead of running it as a script, so that its byte code is used; and from our own folders,
whatever else is called `rallypoint` there. The packages are empty (see `supervisor`).
"""
_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))

ANSWER_TIMEOUT = 30.0
"""Seconds for an answer. It takes less than a millisecond unless the machine is overloaded."""
_CLOSE_TIMEOUT = 1.0
"""Seconds that `close` waits for the process to end."""
SENT_TO_ALL = frozenset(
    {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGXCPU}
)
"""Signals that a scheduler may send to every process of a job, and that end a process by default."""


class ReaperLost(RallypointError, RuntimeError):
    """The reaper has ended, or does not answer any more."""


class StartedWorker(NamedTuple):
    """A worker: its pid, for people, and its pidfd, which the receiver closes."""

    pid: int
    pidfd: int


class ExitStatus(NamedTuple):
    """The exit status of a worker: `final` is False if the reaper, its parent, does not know it yet: the worker runs,
    or its tracer (a debugger) has been notified first and still holds it. `code` is the exit code, -N for death by
    signal N; None if it is not known.
    """

    final: bool
    code: int | None


class ReaperClient:
    """One reaper. `pid` is that of its supervisor, which is our child.

    Raises:
        RallypointError: this machine has no room for another process, or denies what we need.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.excluded: set[int] = set()
        """Workers that no sweep touches."""
        self.ignored: Collection[int] = ()
        """Signals that workers ignore initially, in addition to those that we ignore."""
        self._closed = False
        self.lost_reason = ""
        """Once it is lost: how it ended, as text."""
        check_kernel()
        try:
            self.pid, link, self._pidfd = _start()
        except OSError as error:
            raise ResourceError(
                f"the reaper of the workers could not be started by {sys.executable!r}: {error.strerror or error}; "
                "look at the limits of processes and open files (`ulimit -a`)"
            ) from None
        link.settimeout(ANSWER_TIMEOUT)
        self._link = protocol.Connection(link)

    def fileno(self) -> int:
        """A descriptor that becomes readable when the process has ended."""
        return self._pidfd

    @property
    def lost(self) -> bool:
        """Whether it, or its supervisor, has ended without having been closed."""
        known = self._closed or self.lost_reason
        if not known and (readable(self._pidfd) or readable(self._link.fileno(), events=0)):
            self._disconnect("")
        return bool(self.lost_reason)

    def spawn(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        stdio: tuple[int | None, int | None, int | None] = (None, None, None),
        cpus: Collection[int] = (),
        excluded: bool = False,
        blocked: Collection[int] = (),
    ) -> StartedWorker:
        """Start a worker in a session of its own, with our folder, umask, signal mask and ignored signals.

        Args:
            argv: the program and its arguments; the program is looked up on the PATH of `env`.
            env: its whole environment.
            stdio: its descriptors 0, 1 and 2; None to pass on ours unchanged (if our children inherit it).
            cpus: the processors that it may run on; empty for those of the reaper, which had ours.
            excluded: whether every sweep spares it, and its descendants, until it has ended.
            blocked: signals that it blocks initially, in addition to those that we block.

        Raises:
            OSError: it cannot be started.
            UserError: an argument has a NUL byte, or the name of a variable is invalid.
            ReaperLost: see the class.
        """
        program = executable_candidates(argv[0], env), encoded_arguments(argv), encoded_environment(env)
        folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            standard, places = standard_descriptors(*stdio)
            settings = worker_settings(places, cpus, blocked, self.ignored)
            pid, descriptors = self._request(protocol.SPAWN, *program, settings, excluded, beside=[folder, *standard])
        finally:
            os.close(folder)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        if not descriptors:  # the kernel drops those for which we have no room
            self._request(protocol.KILL, pid)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if excluded:
            self.excluded.add(pid)
        return StartedWorker(pid, descriptors[0])

    def status(self, pid: int) -> ExitStatus:
        """The exit status of a worker. A code is returned once; afterwards it is not known. Raises ReaperLost."""
        answer, _ = self._request(protocol.STATUS, pid)
        return ExitStatus(False, None) if answer == protocol.NOT_YET else ExitStatus(True, answer)

    def adopt(self, pid: int, excluded: bool = False) -> bool:
        """Adopt as a worker a process that is below another one, and whose parent is about to end.

        Args:
            pid, excluded: the process; whether it is not yet a worker: every sweep spares it until it is adopted as
            one.

        Returns:
            Whether it exists; if not, it has ended with an unknown status.

        Raises:
            ReaperLost: see the class.
        """
        (self.excluded.add if excluded else self.excluded.discard)(pid)
        return bool(self._request(protocol.ADOPT, pid, excluded)[0])

    def signals_received(self) -> list[int]:
        """The signals that it was sent since this was last called, or since it started a worker. Raises ReaperLost."""
        numbers: list[int] = self._request(protocol.SIGNALS)[0]
        return numbers

    def set_cleanup(self, empty: Sequence[str] = (), whole: Sequence[str] = ()) -> None:
        """Set what to remove if this process ends without closing the reaper; replaces earlier settings.

        Args:
            empty: folders to remove, with those below them, as far as they are empty.
            whole: folders to remove with all that is in them.

        Raises:
            ReaperLost: see the class.
        """
        self._request(protocol.CLEANUP, [os.fsencode(each) for each in empty], [os.fsencode(each) for each in whole])

    def begin_sweep(self, seconds: float = 0.0, spared: Collection[int] = ()) -> int:
        """Begin to end all workers and all that they have left; replaces a running sweep. Raises ReaperLost.

        Args:
            seconds: between SIGTERM and SIGKILL; 0 for SIGKILL at once.
            spared: pids of workers that go on, with their descendants and their sessions.

        Returns:
            A descriptor, which the caller closes: it delivers a byte when the sweep is over, only end of file if the
            reaper is lost.
        """
        reading, writing = os.pipe()
        try:
            self._exchange((protocol.SWEEP, seconds, list(spared)), [writing], answered=False)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return reading

    def give_up_sweep(self) -> None:
        """Give up the last sweep, and never wait again for what is left now."""
        with contextlib.suppress(ReaperLost):
            self._exchange((protocol.GIVE_UP,), answered=False)

    def fence(self, until: float) -> None:
        """Have it kill all workers at this moment, in seconds on CLOCK_BOOTTIME; replaces the last one, and infinity
        takes it back. Once it has, the next worker that is started is not affected.
        """
        with contextlib.suppress(ReaperLost):  # which has killed them
            self._exchange((protocol.FENCE, until), answered=False)

    def close(self) -> None:
        """End it and everything left below it. Waits a moment for that. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError), self._lock:
            self._link.send((protocol.CLOSE,))
        self._link.close()
        if not readable(self._pidfd, _CLOSE_TIMEOUT):
            log.warning("The reaper (process %d) still ends what the workers have left", self.pid)
        self._reap()
        os.close(self._pidfd)

    # Inside

    def _request(self, *message: object, beside: Sequence[int] = ()) -> tuple[Any, list[int]]:
        (answer,), descriptors = self._exchange(message, beside)
        return answer, descriptors

    def _exchange(self, message: tuple[object, ...], beside: Sequence[int] = (), *, answered: bool = True) -> Any:
        # The lock itself: a context manager in Python can be interrupted when it has the lock and is not yet entered.
        with self._lock:
            if self._closed or self.lost:
                raise ReaperLost(self.lost_reason or "the reaper of the workers is closed")
            try:
                self._link.send(message, beside)
                return self._link.read() if answered else ((), [])
            except BaseException as error:
                self._disconnect("it does not answer" if isinstance(error, TimeoutError) else "")
                if isinstance(error, (OSError, EOFError)):
                    raise ReaperLost(self.lost_reason) from None
                raise

    def _disconnect(self, silence: str) -> None:
        """Break the connection, and say why."""
        self.lost_reason = "the reaper of the workers is lost"  # at once: an exception may come from here on
        self._link.close()
        if silence:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        ended = readable(self._pidfd, _CLOSE_TIMEOUT)
        code = self._reap() if ended else None
        if code in protocol.DENIED:
            self.lost_reason = str(denied_error(protocol.DENIED[code]))
            return
        how = silence or (exit_words(code) if ended else "the connection to it broke")
        killed = code == -signal.SIGKILL and not silence
        where = " (its kernel's log tells of the OOM killer)" if killed else ""
        self.lost_reason = (
            f"the reaper (process {self.pid}), which starts the workers and ends what they leave, is lost: {how}; "
            f"look at what else ends processes on this machine{where}"
        )

    def _reap(self) -> int | None:
        """Reap the process if it has ended; how it ended, if that can be known."""
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
        return None


def _start() -> tuple[int, socket, int]:
    """Start the process: its pid, the connection to it, and what is readable when it has ended."""
    ours, theirs = socketpair()
    with contextlib.ExitStack() as stack:
        if ours.fileno() <= 2:
            ours = socket(fileno=above_standard(ours.detach()))
        stack.callback(ours.close)
        with theirs:
            pid = _spawn_supervisor(theirs.fileno())
            ended = _pidfd(pid)
        stack.pop_all()
    return pid, ours, ended


def _pidfd(pid: int) -> int:
    try:
        return above_standard(os.pidfd_open(pid))
    except ProcessLookupError:  # it has been reaped already
        return above_standard(always_readable())


def _spawn_supervisor(link: int) -> int:
    """Start it with a pidfd of this process, so that no other process can be mistaken for this one."""
    me = os.pidfd_open(os.getpid())
    try:
        given = (link, me)
        numbers = [max(given) + place for place in range(1, len(given) + 1)]  # none takes another's place on the way
        quiet = ["-B"] if sys.dont_write_bytecode else []
        command = [sys.executable, "-I", "-S", *quiet, "-c", _BOOTSTRAP, _FOLDER, *map(str, numbers)]
        return os.posix_spawn(
            sys.executable,
            [*command, "rallypoint-reaper"],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for fd, number in zip(given, numbers, strict=True)],
            setsigmask=signal.valid_signals(),  # until it sets its own signals, ^C must not end it
        )
    finally:
        os.close(me)


def exit_words(exitcode: int | None) -> str:
    """A text for how a process ended, for a message."""
    return "it has ended" if exitcode is None else f"it {how_it_ended(exitcode)}"
