"""Initializes a copy of the zygote, so that it is like a fresh interpreter at this point.

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

_SIGINT, _SIGPIPE, _SIGXFSZ = 2, 13, 25
_NAMES = ("stdin", "stdout", "stderr")


class ForkRequest:
    """The agent's request for one worker; the fields of the message (see `zygote`)."""

    def __init__(self, arguments: Sequence[Any], descriptors: list[int]) -> None:
        self.argv, self.length, self.environ, settings = arguments
        self.places, self.ignored, self.mask, self.umask, self.cpus = settings
        self.folder, *self.standard = descriptors


class CapturedOutput:
    """Output of the imports on standard output and standard error: each worker writes it, as if it had imported."""

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
        request: the description of the worker.
        captured: the output of the imports.
        changed: the changes of the imports to the environment.
        born_ignoring: the signals that the zygote ignored when it was started.
        name: the original name of this process in the kernel.
    """
    _forget_signals()
    posix.setsid()
    posix.fchdir(request.folder)
    posix.umask(request.umask)
    if request.cpus:
        posix.sched_setaffinity(0, request.cpus)
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
    """Set the name of this process in the kernel, for `ps` and the like."""
    fd = posix.open("/proc/self/comm", posix.O_WRONLY | posix.O_CLOEXEC)
    try:
        posix.write(fd, name)
    finally:
        posix.close(fd)


def _forget_signals() -> None:
    """Discard signals that arrived while this process waited: they are blocked, and were not meant for the worker."""
    signal = __import__("_signal")
    for number in signal.sigpending():
        signal.sigtimedwait([number], 0)


def _set_standard_streams(request: ForkRequest) -> None:
    # The descriptors that were sent have numbers above 2.
    for target, place in enumerate(request.places):
        if place == CLOSED:
            posix.close(target)
        else:
            posix.dup2(request.standard[place], target)


def _reopen_stream(fd: int, name: str) -> None:
    """Recreate a standard stream in place, since it remembers what its descriptor was: a file, a terminal."""
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
    """Reseed the random state that each process draws for itself; `random` does so at every fork."""
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
        except OSError:  # it is closed, or has no reader
            return
