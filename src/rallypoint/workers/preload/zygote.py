"""The zygote: imports, checks, and then makes a copy of itself for each worker that is requested.

It is an interpreter with a worker's own command line, held in its `site` phase (see `hook/sitecustomize`); its standard
input is the connection to the agent, its standard output and standard error are files in memory. Messages, in frames of
`reaper.protocol`:

    first      (modules, those to leave out, variables that each worker has of its own, path0, main file or None,
               PYTHONPATH or None, ignored signals, path of the file for what workers import themselves or None,
               what is run and whether that is a module, if its imports are to be read, or None)
    answers    ("imported",) after each module
               ("ready", names read of the environment, beginnings of names read, each with file and line, what has
               been imported, what of the script's imports could not be, each with the reason), or
               ("unforkable", module, why, packages that could be preloaded instead); then it ends
    a request  (how many copies)
    answers    ("copy", pid) for each, with its pidfd and a connection to it; ("failed", errno) for all that are missing

A copy is sent on its connection: (command line, number of its words that the interpreter takes, environment, settings)
with the descriptors (folder, those for 0, 1 and 2); settings as in `reaper.protocol`.

Laws:

1. It forks with one thread, checked each time.
2. It ends when the agent closes the connection; so does a copy that is not yet a worker.
3. Copies are made concurrently: an intermediate process makes them all and ends, so that their parent is the reaper,
   which adopts orphans (see `reaper.orphan`). Each copy initializes itself.
"""

from __future__ import annotations

import gc
import posix
from _socket import socket, socketpair

from rallypoint.workers.preload import child_init, fork_checks, late_imports
from rallypoint.workers.preload.environ_recorder import replace
from rallypoint.workers.preload.imports import Imports, Unforkable
from rallypoint.workers.reaper.orphan import await_exit, send
from rallypoint.workers.reaper.protocol import Connection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_NAME = b"rally-zygote"
_EIO, _EAGAIN = 5, 11


def serve() -> None:
    """Run the zygote. Returns in its copies only, in each of them as a worker."""
    link = _take_connection()
    name = _own_name()
    (modules, left_out, own, path0, main_file, python_path, ignored, noted_in, script), _ = _read(link)
    _remove_hook(python_path)
    child_init.set_process_name(_NAME)
    imports = Imports(modules, left_out, path0, main_file, {link.fileno()}, script)

    def refuse(unforkable: Unforkable) -> None:
        send(link, "unforkable", unforkable.module, unforkable.reason, imports.packages())
        posix._exit(0)

    try:
        recording = imports.run(own, refuse, lambda: send(link, "imported"))
        captured = child_init.CapturedOutput()
        imports.check_threads()
    except Unforkable as unforkable:
        refuse(unforkable)
    gc.collect()
    gc.freeze()  # so that no collection in a copy writes to, and so copies, the pages of all that is shared
    send(link, "ready", recording.read, recording.prefixes, imports.shown(), imports.failures)
    copy = None
    while copy is None:
        (count,), _ = _read(link)
        copy = _fork_copies(link, count)
    link.close()
    request = child_init.ForkRequest(*_read(copy))
    copy.close()
    child_init.become_worker(request, captured, recording.changed, set(ignored), name)
    if noted_in is not None:
        late_imports.report(noted_in)


def _fork_copies(link: Connection, count: int) -> Connection | None:
    """Make copies, and answer the request. Returns None here, and in each of them the connection to it."""
    if len(fork_checks.threads()) > 1:
        send(link, "failed", _EAGAIN)
        return None
    try:
        between = posix.fork()
    except OSError as error:
        send(link, "failed", error.errno or _EIO)
        return None
    if between:
        try:  # noqa: SIM105 - contextlib may not have been imported
            posix.waitpid(between, 0)
        except OSError:  # reaped by a handler that the imports have set; the answer comes from that process in any case
            pass
        return None
    between = posix.getpid()
    try:
        for _ in range(count):
            theirs, ours = socketpair()
            pid = posix.fork()
            if pid == 0:
                theirs.close()
                await_exit(between)
                return Connection(ours)
            ours.close()
            fd = posix.pidfd_open(pid)
            send(link, "copy", pid, descriptors=(fd, theirs.fileno()))
            posix.close(fd)
            theirs.close()
    except OSError as error:
        send(link, "failed", error.errno or _EIO)
    posix._exit(0)


def _take_connection() -> Connection:
    """Move the connection to another number, and put /dev/null in its place."""
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
    """Remove the hook from the environment of this process, and so of any process that the imports may start."""
    environ = {name: value for name, value in posix.environ.items() if name != b"PYTHONPATH"}
    if python_path is not None:
        environ[b"PYTHONPATH"] = python_path
    replace(environ.items(), {})


def _read(link: Connection) -> tuple[tuple[Any, ...], list[int]]:
    """The next message, and the descriptors that came with it. Ends the process at the connection's end."""
    try:
        return link.read()
    except (OSError, EOFError):
        posix._exit(0)
