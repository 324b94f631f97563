"""What a copy of the zygote does to be what a fresh interpreter would be at this point.

Law: each thing that a new process gets and a fork does not is named here once, in the order in which it is done.
"""

from __future__ import annotations

import io
import os
import posix
import sys

from rallypoint.workers.preload.environ_recorder import replace
from rallypoint.workers.reaper.protocol import CLOSED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_posix: Any = posix
"""For what only Linux has."""
_SIGINT, _SIGPIPE, _SIGXFSZ = 2, 13, 25
_NAMES = ("stdin", "stdout", "stderr")


class ForkRequest:
    """What the agent wants of one worker; the fields of the request (see `zygote`)."""

    def __init__(self, arguments: Sequence[Any], descriptors: list[int]) -> None:
        self.argv, self.length, self.environ, settings = arguments
        self.places, self.ignored, self.mask, self.umask, self.cpus = settings
        self.folder, *self.standard = descriptors


class CapturedOutput:
    """What the imports wrote to standard output and standard error: each worker writes it, as if it had imported."""

    def __init__(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        self.texts = {fd: posix.pread(fd, posix.fstat(fd).st_size, 0) for fd in (1, 2)}


def become_worker(
    request: ForkRequest,
    captured: CapturedOutput,
    changed: dict[bytes, bytes | None],
    born_ignoring: set[int],
    name: bytes,
) -> None:
    """Become the worker.

    Args:
        request: what it shall be.
        captured: what the imports wrote.
        changed: what they changed in the environment.
        born_ignoring: the signals that the zygote ignored when it was started.
        name: what the kernel called this process at first.
    """
    _forget_signals()
    posix.setsid()
    posix.fchdir(request.folder)
    posix.umask(request.umask)
    if request.cpus:
        _posix.sched_setaffinity(0, request.cpus)
    set_process_name(name)
    _set_standard_streams(request)
    replace(request.environ, changed)
    sys.argv[1:] = request.argv[request.length :]
    sys.orig_argv[:] = request.argv
    for number, stream in enumerate(_NAMES):
        _reopen_stream(number, stream)
    _reseed()
    _set_ignored(set(request.ignored), born_ignoring)
    for fd in (request.folder, *request.standard):
        posix.close(fd)
    for fd, text in captured.texts.items():
        _write(fd, text)
    __import__("_signal").pthread_sigmask(2, request.mask)


def set_process_name(name: bytes) -> None:
    """Have the kernel call this process so, in `ps` and the like."""
    fd = posix.open("/proc/self/comm", posix.O_WRONLY | posix.O_CLOEXEC)
    try:
        posix.write(fd, name)
    finally:
        posix.close(fd)


def _forget_signals() -> None:
    """Take what this process was sent while it waited: it is blocked, and was not meant for the worker."""
    signal = __import__("_signal")
    for number in signal.sigpending():
        signal.sigtimedwait([number], 0)


def _set_standard_streams(request: ForkRequest) -> None:
    # What was sent has numbers above 2.
    for target, place in enumerate(request.places):
        if place == CLOSED:
            posix.close(target)
        else:
            posix.dup2(request.standard[place], target)


def _reopen_stream(fd: int, name: str) -> None:
    """Make a standard stream anew in its place, since it remembers what its descriptor was: a file, a terminal."""
    stream = getattr(sys, f"__{name}__")
    try:
        posix.fstat(fd)
    except OSError:
        for each in (name, f"__{name}__"):
            setattr(sys, each, None)
        return
    if not isinstance(stream, io.TextIOWrapper):
        return
    buffered = isinstance(stream.buffer, (io.BufferedReader, io.BufferedWriter))
    through = stream.write_through
    raw = io.FileIO(fd, "wb" if fd else "rb", closefd=False)
    buffer: Any = raw
    if buffered:
        buffer = io.BufferedWriter(raw) if fd else io.BufferedReader(raw)
    lines = (fd == 2 or raw.isatty()) and not through
    # In place: handlers that the imports have made for logging hold these very objects.
    encoding, errors = stream.encoding, stream.errors
    io.TextIOWrapper.__init__(
        stream, buffer, encoding, errors, newline="\n", line_buffering=lines, write_through=through
    )
    setattr(raw, "name", f"<{name}>")  # noqa: B010 - as the interpreter does; its type says that it cannot be set
    setattr(stream, "mode", "w" if fd else "r")  # noqa: B010


def _reseed() -> None:
    """Draw anew what each process draws for itself; `random` does so at every fork."""
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)
    threading = sys.modules.get("threading")
    if threading is not None:
        threading.main_thread()._set_native_id()


def _set_ignored(wanted: set[int], before: set[int]) -> None:
    signal = __import__("_signal")
    for number in (wanted ^ before) - {_SIGPIPE, _SIGXFSZ}:
        usual = signal.default_int_handler if number == _SIGINT else signal.SIG_DFL
        now = signal.getsignal(number)
        if number in wanted and now in (usual, signal.SIG_DFL):
            signal.signal(number, signal.SIG_IGN)
        elif number in before and now == signal.SIG_IGN:
            signal.signal(number, usual)


def _write(fd: int, text: bytes) -> None:
    while text:
        try:
            text = text[posix.write(fd, text) :]
        except OSError:  # it is closed, or nobody reads it
            return
