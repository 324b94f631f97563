"""The agent's end of its guardian: starting it, asking it, and knowing when it is gone.

Laws:

1. `Guardian()` does not wait for the process to be ready; the first call does.
2. A call that does not come to its end (an exception of a signal handler, a lost answer) breaks the connection, and the
   guardian then kills all that is below it: so no half-started worker is left.
3. One object stands for one guardian and its keeper. When either is gone, what they started is killed, calls raise
   `ReaperLost`, and a new object is needed.
4. No descriptor in here is 0, 1 or 2, whichever of these this process was started without.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from socket import MSG_CMSG_CLOEXEC, socket, socketpair
from typing import Any, NamedTuple

from rallypoint.base.errors import RallypointError, ResourceError, UserError
from rallypoint.base.kernel import check_kernel, denied_error
from rallypoint.base.log import get_logger
from rallypoint.base.procfs import inherited_settings
from rallypoint.base.signals import signal_name
from rallypoint.workers.reaper import protocol

log = get_logger(__name__)

_BOOTSTRAP = (
    "import sys; top, package = map(type(sys), ('rallypoint', 'rallypoint.workers.reaper')); "
    "package.__path__ = [sys.argv[1]]; sys.modules.update({each.__name__: each for each in (top, package)}); "
    "from rallypoint.workers.reaper.supervisor import main; main(sys.argv[2:])"
)
"""Imported and not run as a script, so that it comes from its byte code; and from our own folder, whatever else is
called `rallypoint` there. The packages above are empty (see `supervisor`), and what lies beside them is not
searched."""
_FOLDER = os.path.dirname(__file__)

ANSWER_TIMEOUT = 30.0
"""Seconds for an answer. It comes in under a millisecond unless the machine is in deep trouble."""
_CLOSE_TIMEOUT = 1.0
"""Seconds that `close` waits for the process to end."""
SENT_TO_ALL = frozenset(
    {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGXCPU}
)
"""Signals that a scheduler may send to every process of a job, and that end one which does not expect them."""


class ReaperLost(RallypointError, RuntimeError):
    """The guardian has ended, or cannot be spoken to any more."""


class StartedWorker(NamedTuple):
    """A worker: its pid, for people, and its pidfd, which whoever gets it closes."""

    pid: int
    pidfd: int


class ExitStatus(NamedTuple):
    """How a worker has ended.

    `final` is False where the guardian, its parent, has not been told: it runs, or whoever traces it (a debugger) has
    heard first, and holds it still. `code` is the exit code, -N for death by signal N; None if it is not known.
    """

    final: bool
    code: int | None


class ReaperClient:
    """One guardian. `pid` is that of its keeper, which is our child.

    Raises:
        RallypointError: this machine has no room for another process, or denies what we need.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._buffer = bytearray()
        self._late_answers: set[int] = set()
        self.excluded: set[int] = set()
        """Workers that no sweep touches."""
        self._closed = False
        self.lost_reason = ""
        """In words, once it is lost: how it ended."""
        self._pidfd = -1
        check_kernel()
        link: socket | None = None
        try:
            link, theirs = socketpair()
            with theirs:
                self.pid = _start(theirs.fileno())
            if link.fileno() <= 2:
                link = socket(fileno=_above_standard(link.detach()))
            link.settimeout(ANSWER_TIMEOUT)
            try:
                self._pidfd = _above_standard(os.pidfd_open(self.pid))
            except ProcessLookupError:  # somebody has reaped it already
                self._pidfd = _above_standard(os.eventfd(1))
            self._link = link
        except BaseException as error:
            if link is not None:
                link.close()
            if isinstance(error, OSError) and not isinstance(error, ResourceError):
                raise ResourceError(
                    f"the guardian of the workers could not be started by {sys.executable!r}: "
                    f"{error.strerror or error}; look at the limits of processes and open files (`ulimit -a`)"
                ) from None
            raise

    def fileno(self) -> int:
        """A descriptor that becomes readable when the process has ended."""
        return self._pidfd

    @property
    def answers(self) -> int:
        """A descriptor that becomes readable when a sweep is done, or the process has ended."""
        return self._link.fileno()

    @property
    def lost(self) -> bool:
        """Whether it, or its keeper, has gone without having been closed."""
        if not self._closed and not self.lost_reason and (readable(self._pidfd) or _hung_up(self._link.fileno())):
            self._disconnect("")
        return bool(self.lost_reason)

    def spawn(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        stdin: int | None,
        stdout: int | None,
        stderr: int | None,
        cpus: Collection[int] = (),
        kept: bool = False,
        blocked: Collection[int] = (),
    ) -> StartedWorker:
        """Start a worker in a session of its own, with our folder, umask, signal mask and ignored signals.

        Args:
            argv: the program and its arguments; the program is looked up on the PATH of `env`.
            env: its whole environment.
            stdin: its standard input; None to hand on ours, as it is (if 0 is what any child of ours inherits).
            stdout: the same for standard output.
            stderr: the same for standard error.
            cpus: the processors that it may run on; none named means those of the guardian, which had ours.
            kept: whether every sweep spares it, and what is below it, until it has ended.
            blocked: signals that it blocks at first, beside those that we block.

        Raises:
            OSError: it cannot be started.
            UserError: a NUL byte in an argument, or a variable's name that none can have.
            ReaperLost: see the class.
        """
        programs = [os.fsencode(each) for each in _executable_candidates(argv[0], env)]
        arguments, environment = encoded_arguments(argv), encoded_environment(env)
        ours = inherited_settings()
        mask = sorted({*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())), *map(int, blocked)})
        folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            standard, places = standard_descriptors(stdin, stdout, stderr)
            surroundings = (places, sorted(ours.ignored), mask, ours.umask, sorted(cpus))
            request = (programs, arguments, environment, *surroundings, kept)
            pid, descriptors = self._request(protocol.SPAWN, *request, descriptors=[folder, *standard])
        finally:
            os.close(folder)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        if not descriptors:  # the kernel drops those for which we have no room
            self._request(protocol.KILL, pid)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if kept:
            self.excluded.add(pid)
        return StartedWorker(pid, descriptors[0])

    def status(self, pid: int) -> ExitStatus:
        """How a worker has ended. A code is told once; afterwards it is not known.

        Raises:
            ReaperLost: see the class.
        """
        answer = self._request(protocol.STATUS, pid)[0]
        return ExitStatus(False, None) if answer == protocol.NOT_YET else ExitStatus(True, answer)

    def adopt(self, pid: int) -> bool:
        """Count a process as a worker that is below a kept one, and whose parent is about to end.

        Returns:
            Whether it is there; if not, it has ended, and nobody knows how.

        Raises:
            ReaperLost: see the class.
        """
        return bool(self._request(protocol.ADOPT, pid)[0])

    def signals_received(self) -> list[int]:
        """The signals that it was sent since this was last asked, or since it started a worker.

        Raises:
            ReaperLost: see the class.
        """
        numbers: list[int] = self._request(protocol.HEARD)[0]
        return numbers

    def set_cleanup(self, empty: Sequence[str] = (), whole: Sequence[str] = ()) -> None:
        """What to remove should this process end without closing us. Takes the place of what was said before.

        Args:
            empty: folders that go, with those below them, as far as they are empty.
            whole: folders that go with all that is in them.

        Raises:
            ReaperLost: see the class.
        """
        self._request(protocol.CLEANUP, [os.fsencode(each) for each in empty], [os.fsencode(each) for each in whole])

    def trim_memory(self) -> None:
        """There is time: it may give back the memory that only its start needed."""
        with contextlib.suppress(ReaperLost), self._lock, self._check_connected():
            self._send(protocol.SHRINK)

    def begin_sweep(self, seconds: float = 0.0) -> int:
        """Have everything ended that the workers are and have left, in the place of a sweep that runs.

        Args:
            seconds: between SIGTERM and SIGKILL; 0 for SIGKILL at once.

        Returns:
            A number for `swept`.

        Raises:
            ReaperLost: see the class.
        """
        with self._lock, self._check_connected():
            return self._send(protocol.SWEEP, seconds)

    def is_swept(self, number: int) -> bool:
        """Whether the sweep of that number is done, without waiting.

        Raises:
            ReaperLost: see the class.
        """
        with self._lock, self._check_connected():
            while number not in self._late_answers and readable(self._link.fileno()):
                found, _ = self._read()
                self._late_answers.add(found[0])
        if number in self._late_answers:
            self._late_answers.discard(number)
            return True
        return False

    def give_up_sweep(self) -> None:
        """End the sweep that was begun last, and never wait again for what is left now. Does not wait for an answer."""
        with contextlib.suppress(ReaperLost), self._lock, self._check_connected():
            self._send(protocol.GIVE_UP)

    def sweep_end_seen(self, number: int) -> bool:
        """Whether that sweep's end came beside another answer, so that `answers` does not tell of it any more."""
        return number in self._late_answers

    def close(self) -> None:
        """End it, and with it whatever is left below it. Waits a moment for that. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError), self._lock:
            self._send(protocol.CLOSE)
        self._link.close()
        if not readable(self._pidfd, _CLOSE_TIMEOUT):
            log.warning("The guardian (process %d) takes its time to end what the workers have left", self.pid)
        self._reap()
        os.close(self._pidfd)

    # Inside

    def _request(self, name: str, *arguments: object, descriptors: Sequence[int] = ()) -> tuple[Any, list[int]]:
        with self._lock, self._check_connected():
            number = self._send(name, *arguments, descriptors=descriptors)
            received: list[int] = []
            while True:
                # The descriptors of our answer may have come with the end of a sweep before it.
                message, more = self._read()
                received += more
                if message[0] == number:
                    # The end of a sweep that came with it would be told by no descriptor any more.
                    while (beside := protocol.parse(self._buffer)) is not None:
                        self._late_answers.add(beside[0])
                    return message[1], received
                self._late_answers.add(message[0])

    def _send(self, name: str, *arguments: object, descriptors: Sequence[int] = ()) -> int:
        self._number += 1
        data = protocol.frame((self._number, name, *arguments))
        sent = self._link.sendmsg([data], protocol.ancillary_data(list(descriptors)))
        if sent < len(data):
            self._link.sendall(memoryview(data)[sent:])
        return self._number

    def _read(self) -> tuple[tuple[Any, ...], list[int]]:
        """The next answer, waiting for it."""
        received: list[int] = []
        while (message := protocol.parse(self._buffer)) is None:
            data, ancillary, _, _ = self._link.recvmsg(4096, 32 * protocol.MAX_DESCRIPTORS, MSG_CMSG_CLOEXEC)
            if not data:
                raise ConnectionResetError
            self._buffer += data
            received += protocol.descriptors_in(ancillary)
        return message, received

    @contextlib.contextmanager
    def _check_connected(self) -> Any:
        if self._closed or self.lost:
            raise ReaperLost(self.lost_reason or "the guardian of the workers is closed")
        try:
            yield
        except BaseException as error:
            self._disconnect("it does not answer" if isinstance(error, TimeoutError) else "")
            if isinstance(error, OSError):
                raise ReaperLost(self.lost_reason) from None
            raise

    def _disconnect(self, silence: str) -> None:
        """Break the connection, and say why."""
        self._link.close()
        if silence:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        ended = readable(self._pidfd, _CLOSE_TIMEOUT)
        code = self._reap() if ended else None
        if code in protocol.DENIED:
            self.lost_reason = str(denied_error(protocol.DENIED[code]))
            return
        how = silence or (_exit_words(code) if ended else "the connection to it broke")
        killed = code == -signal.SIGKILL and not silence
        where = " (its kernel's log tells of the OOM killer)" if killed else ""
        self.lost_reason = (
            f"the guardian (process {self.pid}), which starts the workers and ends what they leave, is lost: {how}; "
            f"look at what else ends processes on this machine{where}"
        )

    def _reap(self) -> int | None:
        """Reap the process if it has ended; how it ended, if that can be known."""
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
        return None


def _start(link: int) -> int:
    """Start the process; it gets the connection and a pidfd of ours, so that no other can be taken for us."""
    me = os.pidfd_open(os.getpid())
    try:
        # Above both, so that neither takes the other's place on the way.
        theirs, mine = max(link, me) + 1, max(link, me) + 2
        quiet = ["-B"] if sys.dont_write_bytecode else []
        argv = [
            sys.executable,
            "-I",
            "-S",
            *quiet,
            "-c",
            _BOOTSTRAP,
            _FOLDER,
            str(theirs),
            str(mine),
            "rallypoint-guardian",
        ]
        return os.posix_spawn(
            sys.executable,
            argv,
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, link, theirs), (os.POSIX_SPAWN_DUP2, me, mine)],
            setsigmask=signal.valid_signals(),  # until it can see to itself, no ^C ends it
        )
    finally:
        os.close(me)


def _exit_words(exitcode: int | None) -> str:
    if exitcode is None:
        return "it has ended"
    return f"it was killed by {signal_name(exitcode)}" if exitcode < 0 else f"it ended with exit code {exitcode}"


def readable(fd: int, seconds: float = 0.0) -> bool:
    """Whether a descriptor is readable, or becomes so within this time."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(seconds * 1000))


def _hung_up(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, 0)
    return bool(poller.poll(0))


def _is_inherited(fd: int) -> bool:
    """Whether every child of ours gets this descriptor. What we have opened in the place of a closed one is not."""
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


def _above_standard(fd: int) -> int:
    """This descriptor under a number above 2."""
    if fd > 2:
        return fd
    import fcntl

    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def standard_descriptors(*given: int | None) -> tuple[list[int], list[int]]:
    """What to send for 0, 1 and 2 of a worker: the descriptors, and for each of the three its place among them.

    Args:
        given: the descriptors; None for ours, as far as any child of ours would inherit it.
    """
    sent: list[int] = []
    places = []
    for default, fd in enumerate(given):
        there = fd is not None or _is_inherited(default)
        places.append(len(sent) if there else protocol.CLOSED)
        sent += [default if fd is None else fd] * there
    return sent, places


def encoded_arguments(argv: Sequence[str]) -> list[bytes]:
    """Arguments as the kernel takes them. Raises UserError for a NUL byte."""
    return [_checked_bytes(os.fsencode(each)) for each in argv]


def encoded_environment(env: Mapping[str, str]) -> dict[bytes, bytes]:
    """Variables as the kernel takes them. Raises UserError for a NUL byte, or a name that none can have."""
    return {_name(os.fsencode(name)): _checked_bytes(os.fsencode(value)) for name, value in env.items()}


def _executable_candidates(name: str, env: Mapping[str, str]) -> list[str]:
    if os.path.dirname(name):
        return [name]
    return [os.path.join(folder, name) for folder in os.get_exec_path(env)]


def _checked_bytes(data: bytes) -> bytes:
    if b"\0" in data:
        raise UserError(f"{os.fsdecode(data)!r} holds a null byte, which no program can be given; take it out")
    return data


def _name(data: bytes) -> bytes:
    if b"=" in data:
        raise UserError(f"{os.fsdecode(data)!r} holds a '=', which no variable name can; take it out")
    return _checked_bytes(data)
