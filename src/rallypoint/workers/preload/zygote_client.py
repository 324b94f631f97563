"""The agent's end of one zygote.

Laws:

1. Making one does not wait for it. What it says is read by `look`, which does not wait either.
2. A request that does not come to its end breaks the connection: the zygote ends, and so does the worker that it may
   have made, which nobody has told to go on.
3. It lives below one guardian, and is spared by that guardian's sweeps.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from socket import MSG_CMSG_CLOEXEC, socketpair
from typing import Any, NamedTuple

from rallypoint.base.kernel import memory_file
from rallypoint.base.procfs import inherited_settings
from rallypoint.base.signals import signal_name
from rallypoint.workers.preload.command import NeverForkable, NotForkable, PreloadCommand, parse_command
from rallypoint.workers.preload.environment import affinity_conflict, first_difference
from rallypoint.workers.reaper import protocol
from rallypoint.workers.reaper.client import (
    SENT_TO_ALL,
    ReaperClient,
    ReaperLost,
    StartedWorker,
    encoded_arguments,
    encoded_environment,
    readable,
    standard_descriptors,
)

FORK_TIMEOUT = 5.0
"""Seconds for a worker to be made. It takes some milliseconds unless the machine is in deep trouble."""
_HOOK = os.path.join(os.path.dirname(__file__), "hook")
_MESSAGE_SIZE = 512
_MAX_STATUS_TEXT = 200


class ZygotePhase(Enum):
    """What a zygote is at."""

    IMPORTING = "importing"
    READY = "ready"
    UNFORKABLE = "unfit"
    """It must not be forked; `why` tells what the imports did."""
    LOST = "lost"
    """It has ended, or cannot be spoken to; `why` tells how, as far as that is known."""


class PreloadSpec(NamedTuple):
    """What a zygote imports."""

    modules: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    """What it leaves out of that which it would import of itself."""
    per_worker_variables: tuple[str, ...] = ()
    """Names of variables that each worker has of its own: a zygote whose imports read one is of no use."""
    noted_in: str | None = None
    """The path of a file in which workers note what they import after the fork; None if they need not."""


class ZygoteClient:
    """One zygote.

    Args:
        guardian: what starts it, and ends it with all else.
        argv: the command of a worker.
        environ: what the imports are to find: the environment that all workers will have in common.
        request: what it imports, and how.

    Raises:
        Cold: workers of this command cannot be forked.
        OSError: it cannot be started.
        ReaperLost: the guardian has ended.
    """

    def __init__(
        self, guardian: ReaperClient, argv: Sequence[str], environ: Mapping[str, str], request: PreloadSpec
    ) -> None:
        self.phase = ZygotePhase.IMPORTING
        self.reason = ""
        self.imported = 0
        """How many modules it has imported."""
        self.module = ""
        """The module that makes it unfit."""
        self.packages: tuple[str, ...] = ()
        """If it is unfit: what it could have imported instead."""
        self.is_permanent = False
        """Whether it is lost because it ended by itself during the imports, as another would."""
        self.reaper = guardian
        self._command = parse_command(argv)
        if os.pathsep in _HOOK or not os.path.isfile(os.path.join(_HOOK, "sitecustomize.py")):
            raise NotForkable(f"Rallypoint lies where no interpreter would find it by PYTHONPATH: {_HOOK}")
        self._environ = dict(environ)
        self._read: Mapping[str, str] = {}
        self._beginnings: Mapping[str, str] = {}
        self._cpus = os.sched_getaffinity(0)
        self._folder = _folder()
        self._ignored = sorted(inherited_settings().ignored)
        self._buffer = bytearray()
        self._pidfd = self._status_text = -1
        self._link, theirs = socketpair()
        try:
            self._status_text = memory_file("rallypoint-warm-stderr")
            with theirs:
                self.pid = self._start(theirs.fileno(), argv)
            self._link.settimeout(FORK_TIMEOUT)
            command, python_path = self._command, environ.get("PYTHONPATH")
            self._send(
                list(request.modules),
                list(request.left_out),
                list(request.per_worker_variables),
                command.path0,
                command.main_file,
                None if python_path is None else os.fsencode(python_path),
                self._ignored,
                request.noted_in,
            )
        except BaseException:
            theirs.close()
            self.close()
            raise

    def _start(self, link: int, argv: Sequence[str]) -> int:
        path = self._environ.get("PYTHONPATH")
        environ = {**self._environ, "PYTHONPATH": _HOOK + (os.pathsep + path if path else "")}
        output = memory_file("rallypoint-warm-stdout")
        try:
            # What a scheduler sends to all processes must not end it; its copies have the mask of their own order.
            started = self.reaper.spawn(argv, environ, link, output, self._status_text, kept=True, blocked=SENT_TO_ALL)
        finally:
            os.close(output)
        self._pidfd = started.pidfd
        return started.pid

    def fds(self) -> list[int]:
        """Descriptors that become readable when there is something to `look` at."""
        return [] if self._link.fileno() < 0 else [self._link.fileno()]

    def poll(self) -> ZygotePhase:
        """Take notice of what it has said, or of its end. Returns what it is at now."""
        while self._link.fileno() >= 0 and (self._buffer or readable(self._link.fileno())):
            try:
                message, _ = self._receive()
            except (OSError, EOFError):
                self._disconnect()
                break
            if message[0] == "ready":
                self.phase, self._read, self._beginnings = ZygotePhase.READY, *message[1:]
            elif message[0] == "imported":
                self.imported += 1
            elif message[0] == "unfit":
                self.phase, self.module, self.reason, packages = ZygotePhase.UNFORKABLE, *message[1:]
                self.packages = tuple(packages)
                self.close()
        return self.phase

    def fork(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        stdin: int | None,
        stdout: int | None,
        stderr: int | None,
        cpus: Collection[int] = (),
    ) -> StartedWorker:
        """Have it make a worker; the arguments are those of `Guardian.spawn`.

        Raises:
            Cold: this worker would not be what a cold one is, or none could be made; in the latter case the zygote may
                be lost.
            UserError: as `Guardian.spawn` raises it.
            ReaperLost: the guardian has ended.
        """
        self._check(parse_command(argv), environ, cpus)
        arguments, variables = encoded_arguments(argv), encoded_environment(environ)
        ours = inherited_settings()
        mask = [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
        standard, places = standard_descriptors(stdin, stdout, stderr)
        folder, waiting, go = _opened()
        try:
            self._send(
                [os.fsdecode(each) for each in arguments],
                self._command.length,
                list(variables.items()),
                places,
                sorted(ours.ignored),
                mask,
                ours.umask,
                sorted(cpus),
                descriptors=[folder, waiting, *standard],
            )
            started = self._receive_pid()
            self._release_worker(started, go)
            return started
        except (OSError, EOFError) as error:
            self._disconnect(silent=isinstance(error, TimeoutError))
            raise NotForkable(self.reason) from None
        except (NotForkable, ReaperLost):
            raise
        except BaseException:
            self._disconnect()
            raise
        finally:
            for fd in (folder, waiting, go):
                os.close(fd)

    def _check(self, command: PreloadCommand, environ: Mapping[str, str], cpus: Collection[int]) -> None:
        if command != self._command:
            raise NeverForkable("this worker's command is another than that of the first")
        if _folder() != self._folder:
            raise NeverForkable("the working folder is another than when the modules were imported")
        differs = first_difference(self._environ, environ, self._read, self._beginnings)
        if differs:
            raise NeverForkable(differs.text, about=differs.name)
        why = affinity_conflict(self._cpus, cpus, environ)
        if why:
            raise NeverForkable(why)

    def _receive_pid(self) -> StartedWorker:
        message, descriptors = self._receive()
        if message[0] == "failed":
            raise NotForkable(f"no copy could be made: {os.strerror(message[1])}")
        if not descriptors:  # the kernel drops those for which we have no room
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return StartedWorker(message[1], descriptors[0])

    def _release_worker(self, started: StartedWorker, go: int) -> None:
        """Have the guardian listen for its end, and let it go on."""
        try:
            if not self.reaper.adopt(started.pid):
                raise NotForkable("the copy ended at once")
            os.write(go, b"g")
        except BaseException:
            os.close(started.pidfd)
            raise

    def close(self) -> None:
        """Let go of it; it ends then. Idempotent."""
        self._link.close()
        for name in ("_pidfd", "_status_text"):
            fd = getattr(self, name)
            setattr(self, name, -1)
            if fd >= 0:
                os.close(fd)

    def _send(self, *message: Any, descriptors: Sequence[int] = ()) -> None:
        data = protocol.frame(message)
        sent = self._link.sendmsg([data], protocol.ancillary_data(list(descriptors)))
        if sent < len(data):
            self._link.sendall(memoryview(data)[sent:])

    def _receive(self) -> tuple[tuple[Any, ...], list[int]]:
        descriptors: list[int] = []
        while (message := protocol.parse(self._buffer)) is None:
            data, ancillary, _, _ = self._link.recvmsg(1 << 16, _MESSAGE_SIZE, MSG_CMSG_CLOEXEC)
            if not data:
                raise EOFError
            self._buffer += data
            descriptors += protocol.descriptors_in(ancillary)
        return message, descriptors

    def _disconnect(self, silent: bool = False) -> None:
        """It is gone, or as good as gone: break the connection, and say why."""
        if self.phase is ZygotePhase.LOST:
            return
        importing = self.phase is ZygotePhase.IMPORTING
        self.phase = ZygotePhase.LOST
        self.reason = f"it did not answer within {FORK_TIMEOUT:.0f} s" if silent else self._exit_words(importing)
        if importing and not silent:
            words = (
                os.pread(self._status_text, os.fstat(self._status_text).st_size, 0).decode(errors="replace").split("\n")
            )
            last = next((line.strip() for line in reversed(words) if line.strip()), "")
            self.reason += f" during the imports{f'; its last words: {last[-_MAX_STATUS_TEXT:]}' if last else ''}"
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self.close()

    def _exit_words(self, importing: bool) -> str:
        if not readable(self._pidfd, 1.0):
            return "the connection to it broke"
        try:
            code = self.reaper.status(self.pid).code
        except ReaperLost:
            return "its guardian is lost"
        if code is None:
            return "it has ended"
        self.is_permanent = importing and code >= 0
        return f"it was killed by {signal_name(code)}" if code < 0 else f"it ended with exit code {code}"


def _opened() -> tuple[int, int, int]:
    """The working folder, and both ends of a pipe."""
    folder = -1
    try:
        folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        waiting, go = os.pipe2(os.O_CLOEXEC)
    except OSError as error:
        if folder >= 0:
            os.close(folder)
        raise NotForkable(f"no copy could be asked for: {error.strerror}") from None
    return folder, waiting, go


def _folder() -> tuple[int, int]:
    found = os.stat(".")
    return found.st_dev, found.st_ino
