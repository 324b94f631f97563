"""The zygote: imports, checks, and then makes a copy of itself for each worker that it is asked for.

It is an interpreter with a worker's own command line, held in its `site` phase (see `hook/sitecustomize`); its standard
input is the connection to the agent, its standard output and standard error are files in memory. Messages are frames of
`guardian.protocol`:

    first      (modules, those to leave out, variables that each worker has of its own, path0, main file or None,
               PYTHONPATH or None, ignored signals, path of the file for what workers import themselves or None)
    answers    ("imported",) after each module
               ("ready", names read of the environment, beginnings of names read, each with file and line), or
               ("unfit", module, why, packages that could be preloaded instead); after the latter it ends
    a request  (command line, how much of it the interpreter takes, environment, places of 0, 1, 2, ignored signals,
               mask, umask, cpus)
               with the descriptors (folder, go, those for 0, 1 and 2)
    answer     ("born", pid) with a pidfd, or ("failed", errno)

Laws:

1. It makes a copy of a copy, and the one between ends at once: so a worker's parent is the guardian, which adopts
   orphans, and its exit code is learnt where those of cold workers are.
2. A worker goes no further than the byte on `go`, which the agent writes when the guardian knows the worker. So none
   can end before its end is listened for, and none is left where the agent was cut short.
3. It forks with one thread, checked each time.
4. It ends when the agent lets go of the connection.
"""

from __future__ import annotations

import gc
import posix
from _socket import MSG_CMSG_CLOEXEC, socket

from rallypoint.workers.preload import child_init, fork_checks, late_imports
from rallypoint.workers.preload.environ_recorder import replace
from rallypoint.workers.preload.imports import Imports, Unforkable
from rallypoint.workers.reaper import protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_NAME = b"rallypoint-warm"
_MESSAGE_SIZE = 512
_EAGAIN, _EIO = 11, 5


class _AgentConnection:
    """The connection to the agent."""

    def __init__(self, fd: int) -> None:
        self._socket = socket(fileno=fd)
        self._socket.setblocking(True)
        self._buffer = bytearray()

    def fileno(self) -> int:
        return int(self._socket.fileno())

    def read(self) -> tuple[tuple[Any, ...], list[int]]:
        """The next message, and the descriptors that came with it. Ends the process at the connection's end."""
        descriptors: list[int] = []
        while (message := protocol.parse(self._buffer)) is None:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(1 << 18, _MESSAGE_SIZE, MSG_CMSG_CLOEXEC)
            except OSError:
                data, ancillary = b"", []
            if not data:
                posix._exit(0)
            descriptors += protocol.descriptors_in(ancillary)
            self._buffer += data
        return message, descriptors

    def send(self, message: tuple[Any, ...], descriptors: list[int] | None = None) -> None:
        """Send a message; nothing happens if nobody is there."""
        try:
            self._socket.sendmsg([protocol.frame(message)], protocol.ancillary_data(descriptors or []))
        except OSError:
            return

    def close(self) -> None:
        self._socket.close()


def serve() -> None:
    """Be the zygote. Returns in its copies only, and in each of them as a worker."""
    link = _take_connection()
    name = _own_name()
    (modules, left_out, own, path0, main_file, python_path, ignored, noted_in), _ = link.read()
    _remove_hook(python_path)
    child_init.set_process_name(_NAME)
    imports = Imports(modules, left_out, path0, main_file, {link.fileno()})

    def refuse(unfit: Unforkable) -> None:
        link.send(("unfit", unfit.module, unfit.reason, imports.packages()))
        posix._exit(0)

    try:
        recording = imports.run(own, refuse, lambda: link.send(("imported",)))
        captured = child_init.CapturedOutput()
        imports.check_threads()
    except Unforkable as unfit:
        refuse(unfit)
    gc.collect()
    gc.freeze()  # so that no collection in a copy writes to, and so copies, the pages of all that is shared
    link.send(("ready", recording.read, recording.prefixes))
    while True:
        request, descriptors = link.read()
        parent = _fork(link)
        if parent:
            break
        for fd in descriptors:
            posix.close(fd)
    link.close()
    child_init.become_worker(
        child_init.ForkRequest(request, descriptors), captured, recording.changed, set(ignored), name
    )
    child_init.wait_for_parent_exit(parent)
    if noted_in is not None:
        late_imports.report(noted_in)


def _take_connection() -> _AgentConnection:
    """The connection under another number, and nothing to read in its place."""
    fd = posix.dup(0)
    null = posix.open("/dev/null", posix.O_RDONLY)
    posix.dup2(null, 0)
    posix.close(null)
    return _AgentConnection(fd)


def _own_name() -> bytes:
    fd = posix.open("/proc/self/comm", posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        return posix.read(fd, 64).strip()
    finally:
        posix.close(fd)


def _remove_hook(python_path: bytes | None) -> None:
    """Take the hook out of the environment, of this process and so of what the imports may start."""
    environ = {name: value for name, value in posix.environ.items() if name != b"PYTHONPATH"}
    if python_path is not None:
        environ[b"PYTHONPATH"] = python_path
    replace(environ.items(), {})


def _fork(link: _AgentConnection) -> int:
    """Make a worker; returns 0 in the zygote, and in the worker the pid of the parent that is about to end."""
    if len(fork_checks.threads()) > 1:
        link.send(("failed", _EAGAIN))
        return 0
    try:
        between = posix.fork()
    except OSError as error:
        link.send(("failed", error.errno or _EIO))
        return 0
    if between:
        try:  # noqa: SIM105 - contextlib may not have been imported
            posix.waitpid(between, 0)
        except OSError:  # a handler that the imports have set was faster; the answer is that one's in any case
            pass
        return 0
    try:
        between = posix.getpid()
        pid = posix.fork()
        if pid == 0:
            return between
        link.send(("born", pid), [posix.pidfd_open(pid)])
    except OSError as error:
        link.send(("failed", error.errno or _EIO))
    posix._exit(0)
