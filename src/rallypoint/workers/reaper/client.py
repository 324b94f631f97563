"""The agent's side of its reaper: starts it, sends it requests, and notices when it is gone.

Laws:

1. `ReaperClient()` does not wait until the process is ready; the first call does.
2. An interrupted call (an exception in a signal handler, a lost answer) breaks the connection, and the reaper then
   kills everything below it. So no half-started worker is left, and each answer belongs to the last request.
3. One object represents one reaper and its supervisor. When either is gone, everything that they started is killed, and
   calls raise `ReaperLost`. Then create a new object.
4. No descriptor here is 0, 1 or 2, even if this process was started without them.
5. At most one reaper is started ahead of its agent, and gets ready during the imports. If no agent takes it, it ends
   with this process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posix
import signal
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from socket import socket, socketpair

from rallypoint.base.errors import RallypointError, ResourceError, UserError
from rallypoint.base.kernel import above_standard, always_readable, check_kernel, denied_error, readable
from rallypoint.base.light_typing import TYPE_CHECKING, Any, NamedTuple
from rallypoint.base.log import get_logger
from rallypoint.base.pidfds import HAS_PIDFDS
from rallypoint.base.procfs import inherited_settings
from rallypoint.base.signals import how_it_ended
from rallypoint.workers.reaper import protocol

if TYPE_CHECKING:
    from rallypoint.base.process_handle import ProcessHandle

log = get_logger(__name__)

_BOOTSTRAP = """\
import sys
for name in ("rallypoint", "rallypoint.base", "rallypoint.workers", "rallypoint.workers.reaper"):
    package = sys.modules[name] = type(sys)(name)
    package.__path__ = [sys.argv[1] + name[10:].replace(".", "/")]
from rallypoint.workers.reaper.program import main; main(sys.argv[2:])"""
"""Imports the program instead of running it as a script, so that its bytecode is used. Imports from our own folders, in
case other packages are called `rallypoint`. Its packages are empty (see `program`)."""
_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))

ANSWER_TIMEOUT = 30.0
"""Seconds to wait for an answer, which takes less than a millisecond unless the machine is overloaded."""
_CLOSE_TIMEOUT = 1.0
"""Seconds that `close` waits until the process ends."""
SENT_TO_ALL = frozenset(
    {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGXCPU}
)
"""Signals that a scheduler might send to every process of a job, and that end a process by default."""


class ReaperLost(RallypointError, RuntimeError):
    """The reaper ended, or no longer answers."""


class ReaperDenied(ReaperLost):
    """The reaper ended because a sandbox denies a system call that it needs."""


class Command(NamedTuple):
    """The command of one worker.

    Args:
        argv: the program, looked up on the worker's PATH, and its arguments.
        variables: its environment besides the common one.
        stdio: its descriptors 0, 1 and 2; None passes on ours (if our children inherit it).
        cpus: the processors that it may use; if empty, the reaper's, which are ours.
    """

    argv: Sequence[str]
    variables: Mapping[str, str] = {}
    stdio: tuple[int | None, int | None, int | None] = (None, None, None)
    cpus: Collection[int] = ()


class ExitStatus(NamedTuple):
    """Exit status of a worker. `final` is False while the reaper, its parent, does not know it: the worker is running,
    or its tracer (a debugger) learned about the end first and still holds the process. `code` is the exit code, -N for
    death by signal N; None if unknown."""

    final: bool
    code: int | None


class ReaperClient:
    """One reaper. `pid` is its supervisor's pid: our child.

    Raises:
        RallypointError: this machine has no resources for another process, or denies what we need.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.excluded: set[int] = set()
        """Workers that no sweep touches."""
        self._exits: dict[int, int] = {}
        """Exit codes that arrived with a requested one."""
        self._statuses = threading.Lock()
        self.ignored: Collection[int] = ()
        """Signals that workers initially ignore, besides those that we ignore."""
        self._closed = False
        self._lost_kind = ReaperLost
        self.lost_reason = ""
        """How the reaper ended, as text, once it is lost."""
        check_kernel()
        try:
            self.pid, link, self._ended = _start()
        except OSError as error:
            if error.errno == errno.EPERM:  # the C library uses `clone` only if this returns ENOSYS
                raise denied_error("clone3", why=error) from None
            raise ResourceError(
                f"the reaper of the workers could not be started by {sys.executable!r}: {error.strerror or error}; "
                "check the limits of processes and open files (`ulimit -a`)"
            ) from None
        self._link = protocol.Connection(link)

    def fileno(self) -> int:
        """A descriptor that becomes readable when the process ends."""
        return self._ended

    @property
    def lost(self) -> bool:
        """Whether the reaper or its supervisor ended without being closed."""
        known = self._closed or self.lost_reason
        if not known and (self._has_ended() or readable(self._link.socket.fileno(), events=0)):
            self._disconnect("")
        return bool(self.lost_reason)

    def spawn(
        self,
        commands: Sequence[Command],
        env: Mapping[str, str],
        excluded: bool = False,
        blocked: Collection[int] = (),
    ) -> list[ProcessHandle]:
        """Start all these workers or none, each in its own session, with our folder, umask, signal mask and ignored
        signals.

        Args:
            commands: the workers to start.
            env: their common environment.
            excluded: whether every sweep spares them and their descendants until they end.
            blocked: signals that they initially block, besides those that we block.

        Raises:
            OSError: a worker cannot be started.
            UserError: an argument contains a NUL byte, or the name of a variable is invalid.
            ReaperLost: see the class.
        """
        from rallypoint.base.open_process import child_handle

        _, common = encoded_command((), env)
        settings = worker_settings(blocked, self.ignored)
        folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sent = {folder: 0}
            workers = [
                (*encoded_command(argv, variables), standard_descriptors(sent, *stdio), sorted(cpus))
                for argv, variables, stdio, cpus in commands
            ]
            request = protocol.SPAWN, common, settings, excluded, workers
            answer, descriptors = self._request(*request, beside=[*sent], parts=len(workers))
        finally:
            os.close(folder)
        if isinstance(answer, int):
            raise OSError(-answer, os.strerror(-answer))
        if len(descriptors) < len(answer):  # the kernel drops descriptors that do not fit
            for fd in descriptors:
                os.close(fd)
            self._request(protocol.SIGNAL, answer, int(signal.SIGKILL), answered=False)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        for pid in answer:
            self._exits.pop(pid, None)  # left by an earlier process
        if excluded:
            self.excluded.update(answer)
        return [child_handle(pid, fd, self._signal) for pid, fd in zip(answer, descriptors, strict=True)]

    def _signal(self, pid: int, number: int) -> bool:
        """Send a signal through the reaper to a child that is not reaped yet. Returns False if the reaper is lost."""
        with contextlib.suppress(ReaperLost):
            self._request(protocol.SIGNAL, [pid], int(number), answered=False)
            return True
        return False

    def status(self, pid: int) -> ExitStatus:
        """Exit status of a worker. The code is returned once and forgotten. Raises ReaperLost."""
        with self._statuses:
            running = False
            if pid not in self._exits:
                (exits, running), _ = self._request(protocol.STATUS, pid)
                self._exits.update(exits)
            return ExitStatus(not running, self._exits.pop(pid, None))

    def adopt(self, pid: int, excluded: bool = False) -> bool:
        """Adopt a process as a worker: a descendant of another worker, whose parent is about to end.

        Args:
            pid, excluded: the process, and whether it is not a worker yet, so that sweeps spare it until it is adopted
            as one.

        Returns:
            Whether the process exists; if not, it ended with an unknown status.

        Raises:
            ReaperLost: see the class.
        """
        (self.excluded.add if excluded else self.excluded.discard)(pid)
        return bool(self._request(protocol.ADOPT, pid, excluded, False)[0])

    def adopt_waiting(self, pid: int) -> ProcessHandle | None:
        """`adopt` an excluded process without a handle. Returns the handle, or None if the process ended. Raises
        OSError if no descriptor is free, or ReaperLost."""
        from rallypoint.base.open_process import child_handle

        self.excluded.add(pid)
        exists, descriptors = self._request(protocol.ADOPT, pid, True, True)
        if exists and not descriptors:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return child_handle(pid, descriptors[0], self._signal) if exists else None

    def signals_received(self) -> list[int]:
        """Signals that the reaper received since the last call or the last start of a worker. Raises ReaperLost."""
        numbers: list[int] = self._request(protocol.SIGNALS)[0]
        return numbers

    def set_cleanup(self, empty: Sequence[str] = (), whole: Sequence[str] = ()) -> None:
        """Set what to remove if this process ends without closing the reaper; replaces earlier settings.

        Args:
            empty: folders to remove, with their subfolders, if they are empty.
            whole: folders to remove with everything in them.

        Raises:
            ReaperLost: see the class.
        """
        folders = [os.fsencode(path) for path in empty], [os.fsencode(path) for path in whole]
        self._request(protocol.CLEANUP, *folders, answered=False)

    def set_record(self, folder: str, text: str) -> None:
        """Set a file to write into this folder if this process ends without closing the reaper. The file name contains
        the time and our pid; the file contains this text and a line with the time. Raises ReaperLost."""
        self._request(protocol.RECORD, os.fsencode(folder), os.getpid(), text.encode(), answered=False)

    def begin_sweep(self, seconds: float = 0.0, spared: Collection[int] = ()) -> int:
        """Begin to end all workers and their leftovers; replaces a running sweep. Raises ReaperLost.

        Args:
            seconds: between SIGTERM and SIGKILL; 0 for SIGKILL at once.
            spared: pids of workers that continue, with their descendants and sessions.

        Returns:
            A descriptor, which the caller must close. It delivers a byte when the sweep ends, or only end of file if
            the reaper is lost.
        """
        reading, writing = os.pipe()
        try:
            self._request(protocol.SWEEP, seconds, list(spared), beside=[writing], answered=False)
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return reading

    def give_up_sweep(self) -> None:
        """Give up the last sweep, and never again wait for the processes that are left now."""
        with contextlib.suppress(ReaperLost):
            self._request(protocol.GIVE_UP, answered=False)

    def fence(self, until: float) -> None:
        """Kill all workers at this time, in seconds on CLOCK_BOOTTIME. Replaces the last fence; infinity removes it.
        Does not affect workers started later."""
        with contextlib.suppress(ReaperLost):  # a lost reaper killed them
            self._request(protocol.FENCE, until, answered=False)

    def close(self) -> None:
        """End the reaper and everything left below it. Waits a moment until they end. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError), self._lock:
            self._link.send((protocol.CLOSE,))
        self._link.close()
        if not self._has_ended(_CLOSE_TIMEOUT):
            from rallypoint.workers.reaper.stopped import is_stopped, kill

            if is_stopped(self.pid):
                kill(self.pid, self._ended, _CLOSE_TIMEOUT)
        if not self._has_ended():
            log.warning("The reaper (process %d) is still ending what the workers left behind", self.pid)
        self._reap()
        os.close(self._ended)

    # Internals

    def _has_ended(self, seconds: float = 0.0) -> bool:
        """Whether the supervisor ended, or ends within this time."""
        return readable(self._ended, seconds)

    def _request(
        self, *message: object, beside: Sequence[int] = (), answered: bool = True, parts: int = 1
    ) -> tuple[Any, list[int]]:
        """Send a request with the descriptors `beside` it. Returns the answer and its descriptors.

        Each of its parts may take `ANSWER_TIMEOUT`.
        """
        # Use the lock itself: a context manager in Python could be interrupted after it takes the lock.
        with self._lock:
            if self._closed or self.lost:
                raise self._lost_kind(self.lost_reason or "the reaper of the workers is closed")
            try:
                self._link.socket.settimeout(ANSWER_TIMEOUT * max(1, parts))
                self._link.send(message, beside)
                if not answered:
                    return None, []
                (answer,), descriptors = self._link.read()
                return answer, descriptors
            except BaseException as error:
                self._disconnect("it does not answer" if isinstance(error, TimeoutError) else "")
                if isinstance(error, (OSError, EOFError)):
                    raise self._lost_kind(self.lost_reason) from None
                raise

    def _disconnect(self, silence: str) -> None:
        """Break the connection, and say why."""
        self.lost_reason = "the reaper of the workers is lost"  # set at once: any later line might raise
        self._link.close()
        ended = not silence and self._has_ended(_CLOSE_TIMEOUT)
        if not ended:
            from rallypoint.workers.reaper.stopped import is_stopped, kill

            if silence or is_stopped(self.pid):
                silence = silence or "it was stopped (SIGSTOP)"
                kill(self.pid, self._ended, _CLOSE_TIMEOUT)
                ended = self._has_ended()
        code = self._reap() if ended else None
        if code in protocol.DENIED:
            self.lost_reason, self._lost_kind = str(denied_error(protocol.DENIED[code])), ReaperDenied
            return
        how = silence or (exit_words(code) if ended else "the connection to it broke")
        killed = code == -signal.SIGKILL and not silence
        where = " (its kernel's log reports the OOM killer)" if killed else ""
        self.lost_reason = (
            f"the reaper (process {self.pid}), which starts the workers and ends what they leave behind, was lost: "
            f"{how}; find out what else ends processes on this machine{where}"
        )

    def _reap(self) -> int | None:
        """Reap the process if it ended. Returns how it ended, if known."""
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
        return None


def _start() -> tuple[int, socket, int]:
    """Start the process. Returns its pid, the connection, and a descriptor that becomes readable when it ends."""
    ours, theirs = socketpair()
    with contextlib.ExitStack() as stack:
        if ours.fileno() <= 2:
            ours = socket(fileno=above_standard(ours.detach()))
        stack.callback(ours.close)
        with theirs:
            pid = _spawn_supervisor(theirs.fileno())
            ended = above_standard(_exit_fd(pid))
        stack.pop_all()
    return pid, ours, ended


def _exit_fd(pid: int) -> int:
    try:
        if HAS_PIDFDS:
            return os.pidfd_open(pid)
        from rallypoint.base.without_pidfds import exit_fd

        return exit_fd(pid)
    except ProcessLookupError:  # it was already reaped
        return always_readable()


def _spawn_supervisor(link: int) -> int:
    """Start the supervisor with a pidfd of this process, so that it cannot mistake another process for this one.
    Without pidfds, it checks its parent (see `program`)."""
    given = (link, os.pidfd_open(os.getpid())) if HAS_PIDFDS else (link,)
    try:
        numbers = [max(given) + place for place in range(1, len(given) + 1)]  # so that none overwrites another
        quiet = ["-B"] if sys.dont_write_bytecode else []
        command = [sys.executable, "-I", "-S", *quiet, "-c", _BOOTSTRAP, _FOLDER, *map(str, numbers)]
        # Use `posix`: a debugger replaces the function in `os`, and the reaper would run under it and start too late.
        pid = posix.posix_spawn(
            sys.executable,
            [*command, *(() if HAS_PIDFDS else (f"{os.getpid()}",)), "rallypoint-reaper"],
            os.environ,
            file_actions=[(posix.POSIX_SPAWN_DUP2, fd, number) for fd, number in zip(given, numbers, strict=True)],
            setsigmask=signal.valid_signals(),  # ^C must not end it before it sets its own signals
        )
    finally:
        for fd in given[1:]:
            os.close(fd)
    # If this process raised its limit of open files, this module is imported; workers get the earlier limit.
    if (descriptors := sys.modules.get("rallypoint.base.descriptors")) is not None:
        descriptors.restore_for(pid)
    return pid


def exit_words(exitcode: int | None) -> str:
    """Say how a process ended, for a message."""
    return "it has ended" if exitcode is None else f"it {how_it_ended(exitcode)}"


# A reaper started ahead


_prestarted: ReaperClient | None = None


def prestart() -> None:
    """Start a reaper for `take_prestarted`. Failures are not reported here: the agent retries, and reports them."""
    global _prestarted
    if _prestarted is None:
        try:
            _prestarted = ReaperClient()
        except RallypointError:
            return


def take_prestarted() -> ReaperClient:
    """Return the reaper that was started ahead, or a new one. Raises as `ReaperClient` does."""
    global _prestarted
    taken, _prestarted = _prestarted, None
    if taken is not None and taken.lost:
        taken.close()
        taken = None
    return taken or ReaperClient()


def _reset_after_fork() -> None:
    """Forget the reaper in a forked process: it belongs to the original process."""
    global _prestarted
    _prestarted = None


os.register_at_fork(after_in_child=_reset_after_fork)


# Initial settings of a worker, in the form that requests to the reaper and to zygotes use

Settings = tuple[list[int], list[int], int]
"""Ignored signals, mask, umask."""


def worker_settings(blocked: Collection[int] = (), ignored: Collection[int] = ()) -> Settings:
    """Collect the settings that a worker inherits from this process now, and those set explicitly.

    Args:
        blocked: signals that it initially blocks, besides those that we block.
        ignored: signals that it initially ignores, besides those that we ignore.
    """
    ours = inherited_settings()
    mask = sorted({*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())), *map(int, blocked)})
    return sorted({*ours.ignored, *map(int, ignored)}), mask, ours.umask


def standard_descriptors(sent: dict[int, int], *given: int | None) -> list[int]:
    """Positions of a worker's 0, 1 and 2 among the sent descriptors.

    Args:
        sent: the sent descriptors, with their positions; missing ones are added.
        given: the descriptors; None for ours, if a child of ours would inherit it.
    """
    places = []
    for default, fd in enumerate(given):
        try:  # our replacement for a closed descriptor is not inherited
            there = fd is not None or os.get_inheritable(default)
        except OSError:
            there = False
        places.append(sent.setdefault(default if fd is None else fd, len(sent)) if there else protocol.CLOSED)
    return places


def encoded_command(argv: Sequence[str], env: Mapping[str, str]) -> tuple[list[bytes], dict[bytes, bytes]]:
    """Encode arguments and variables for the kernel. Raises UserError for a NUL byte or an invalid name."""
    if "=" in "".join(env):
        name = next(name for name in env if "=" in name)
        raise UserError(f"{name!r} contains a '=', which a variable name cannot contain; remove it")
    texts = (*argv, *env, *env.values())
    if "\0" in "".join(texts):
        text = next(text for text in texts if "\0" in text)
        raise UserError(f"{text!r} contains a null byte, which cannot be passed to a program; remove it")
    # Do not use `fsencode`, a slow Python function: a start of many workers encodes thousands of variables.
    arguments = [text.encode(_ENCODING, _ERRORS) for text in argv]
    return arguments, {name.encode(_ENCODING, _ERRORS): text.encode(_ENCODING, _ERRORS) for name, text in env.items()}


_ENCODING, _ERRORS = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()
