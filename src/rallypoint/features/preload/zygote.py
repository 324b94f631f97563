"""The zygote imports, checks, and then forks a copy of itself for each requested worker.

It is an interpreter with a worker's command line, stopped in its `site` phase (see `hook/sitecustomize`). Its standard
input is the connection to the agent; its standard output and standard error are files in memory. Messages, in frames of
`reaper.protocol`:

    first      (modules, those to leave out, variables that each worker has of its own, path0, main file or None,
               PYTHONPATH or None, ignored signals, what is run and whether that is a module, if its imports are to be
               read, or None)
    answers    ("imported",) after each module
               ("ready", names read of the environment, each with file and line, what has been imported, what of the
               script's imports could not be, each with the reason), or
               ("unforkable", module, why, packages that could be preloaded instead); then it ends
    a request  (how many copies)
    answers    ("copy", pid) for each, with a connection to it; ("failed", errno) for all that are missing

A copy receives on its connection: (command line, number of words for the interpreter, environment, settings, places,
processors), the last three and the descriptors as for SPAWN in `reaper.protocol`.

Laws:

1. It forks only with a single thread, checked each time.
2. It ends when the agent closes the connection, as does a copy that is not yet a worker.
3. Copies are created concurrently: an intermediate process forks them all and ends, so that their parent is the reaper,
   which adopts orphans and collects their exit codes. Each copy initializes itself after that process has ended.
4. `_become_worker` handles every difference between a new process and a fork.
5. A worker sees only its own modules: this file and `imports` use built-in ones and each other, and leave nothing in
   `sys.modules`.
"""

from __future__ import annotations

import gc
import io
import os
import posix
import select
import sys
from _socket import socket, socketpair

from rallypoint.features.preload.imports import Imports, Unforkable, replace, threads
from rallypoint.workers.reaper.protocol import CLOSED, Connection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

_NAME = b"rally-zygote"
_EIO, _EAGAIN = 5, 11
_SIGINT, _SIGPIPE, _SIGXFSZ = 2, 13, 25
_NAMES = ("stdin", "stdout", "stderr")


def serve() -> None:
    """Run the zygote. Returns only in its copies, as a worker."""
    link = _take_connection()
    name = _own_name()
    (modules, left_out, own, path0, main_file, python_path, ignored, script), _ = _read(link)
    _remove_hook(python_path)
    _set_process_name(_NAME)
    imports = Imports(modules, left_out, path0, main_file, {link.socket.fileno()}, script)

    def refuse(unforkable: Unforkable) -> None:
        _send(link, "unforkable", unforkable.module, unforkable.reason, imports.packages())
        posix._exit(0)

    try:
        recording = imports.run(own, refuse, lambda: _send(link, "imported"))
        captured = _CapturedOutput()
        imports.check_threads()
    except Unforkable as unforkable:
        refuse(unforkable)
    gc.collect()
    gc.freeze()  # so that a collection in a copy does not write to shared pages, which copies them
    _send(link, "ready", recording.read, imports.shown(), imports.failures)
    copy = None
    while copy is None:
        (count,), _ = _read(link)
        copy = _fork_copies(link, count)
    link.close()
    request = _ForkRequest(*_read(copy))
    copy.close()
    _become_worker(request, captured, recording.changed, set(ignored), name)


def _fork_copies(link: Connection, count: int) -> Connection | None:
    """Create copies, and answer the request. Returns None here, and in each copy its connection."""
    if len(threads()) > 1:
        _send(link, "failed", _EAGAIN)
        return None
    try:
        between = posix.fork()
    except OSError as error:
        _send(link, "failed", error.errno or _EIO)
        return None
    if between:
        try:  # noqa: SIM105 - contextlib may not have been imported
            posix.waitpid(between, 0)
        except OSError:  # a handler from the imports reaped it; that process answers in any case
            pass
        return None
    between = posix.getpid()
    try:
        for _ in range(count):
            theirs, ours = socketpair()
            pid = posix.fork()
            if pid == 0:
                theirs.close()
                _await_exit(between)
                return Connection(ours)
            ours.close()
            _send(link, "copy", pid, descriptors=(theirs.fileno(),))
            theirs.close()
    except OSError as error:
        _send(link, "failed", error.errno or _EIO)
    posix._exit(0)


def _take_connection() -> Connection:
    """Move the connection to another descriptor, and replace it with /dev/null."""
    fd = posix.dup(0)
    null = posix.open("/dev/null", posix.O_RDONLY)
    posix.dup2(null, 0)
    posix.close(null)
    return Connection(socket(fileno=fd))


def _own_name() -> bytes:
    fd = posix.open("/proc/self/comm", posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        return posix.read(fd, 64).strip()
    finally:
        posix.close(fd)


def _remove_hook(python_path: bytes | None) -> None:
    """Remove the hook from this process's environment, and so from any child of the imports."""
    environ = {name: value for name, value in posix.environ.items() if name != b"PYTHONPATH"}
    if python_path is not None:
        environ[b"PYTHONPATH"] = python_path
    replace(environ.items(), {})


def _read(link: Connection) -> tuple[tuple[Any, ...], list[int]]:
    """The next message and its descriptors. Ends the process at the connection's end."""
    try:
        return link.read()
    except (OSError, EOFError):
        posix._exit(0)


def _send(link: Connection, *message: object, descriptors: tuple[int, ...] = ()) -> None:
    """Send a message to the agent; does nothing if the agent is gone."""
    try:  # noqa: SIM105 - contextlib may not have been imported
        link.send(message, descriptors)
    except OSError:
        pass


def _await_exit(parent: int) -> None:
    """In a copy: wait until the parent has ended and the reaper has become the parent."""
    poller = select.poll()
    try:
        fd = posix.pidfd_open(parent)
    except (OSError, AttributeError):  # it ended, or there are no pidfds (see `base.process_table`)
        while posix.getppid() == parent:
            poller.poll(1)
        return
    poller.register(fd, select.POLLIN)
    poller.poll()
    posix.close(fd)


# A copy becomes a worker


class _ForkRequest:
    """The agent's request for one worker."""

    def __init__(self, arguments: Sequence[Any], descriptors: list[int]) -> None:
        self.argv, self.length, self.environ, settings, self.places, self.cpus = arguments
        self.ignored, self.mask, self.umask = settings
        self.descriptors = descriptors


class _CapturedOutput:
    """The imports' output on standard output and standard error, which each worker repeats as its own."""

    def __init__(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        self.texts = {fd: posix.pread(fd, posix.fstat(fd).st_size, 0) for fd in (1, 2)}


def _become_worker(
    request: _ForkRequest,
    captured: _CapturedOutput,
    changed: dict[bytes, bytes | None],
    born_ignoring: set[int],
    name: bytes,
) -> None:
    """Make this copy like a fresh interpreter at this point.

    Args:
        request: the description of the worker.
        captured: the output of the imports.
        changed: the changes of the imports to the environment.
        born_ignoring: the signals that the zygote ignored at its start.
        name: the original name of this process in the kernel.
    """
    _forget_signals()
    posix.setsid()
    posix.fchdir(request.descriptors[0])
    posix.umask(request.umask)
    if request.cpus:
        posix.sched_setaffinity(0, request.cpus)
    _set_process_name(name)
    _set_standard_streams(request)
    replace(request.environ, changed)
    sys.argv[1:] = request.argv[request.length :]
    sys.orig_argv[:] = request.argv
    for number, stream in enumerate(_NAMES):
        _reopen_stream(number, stream)
    _reseed()
    _set_ignored(set(request.ignored), born_ignoring)
    for fd in request.descriptors:
        posix.close(fd)
    for fd, text in captured.texts.items():
        _write(fd, text)
    __import__("_signal").pthread_sigmask(2, request.mask)


def _set_process_name(name: bytes) -> None:
    """Set this process's name in the kernel, for `ps` and the like."""
    fd = posix.open("/proc/self/comm", posix.O_WRONLY | posix.O_CLOEXEC)
    try:
        posix.write(fd, name)
    finally:
        posix.close(fd)


def _forget_signals() -> None:
    """Discard blocked signals that arrived while this process waited: they were not for the worker."""
    signal = __import__("_signal")
    for number in signal.sigpending():
        signal.sigtimedwait([number], 0)


def _set_standard_streams(request: _ForkRequest) -> None:
    # The received descriptors have numbers above 2.
    for target, place in enumerate(request.places):
        if place == CLOSED:
            posix.close(target)
        else:
            posix.dup2(request.descriptors[place], target)


def _reopen_stream(fd: int, name: str) -> None:
    """Recreate a standard stream in place, since it remembers the kind of its descriptor: a file, a terminal."""
    stream = getattr(sys, f"__{name}__")
    try:
        posix.fstat(fd)
    except OSError:
        for variable in (name, f"__{name}__"):
            setattr(sys, variable, None)
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
    # Change them in place: logging handlers from the imports refer to these objects.
    encoding, errors = stream.encoding, stream.errors
    io.TextIOWrapper.__init__(
        stream, buffer, encoding, errors, newline="\n", line_buffering=lines, write_through=through
    )
    setattr(raw, "name", f"<{name}>")  # noqa: B010 - as the interpreter does; the type declares it read-only
    setattr(stream, "mode", "w" if fd else "r")  # noqa: B010


def _reseed() -> None:
    """Reseed each process's random state; `random` does so itself at every fork."""
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
