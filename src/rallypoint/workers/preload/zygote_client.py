"""The agent's end of one zygote.

Laws:

1. Creating one does not wait for it. `poll` reads its messages, which does not wait either.
2. A copy that does not arrive in time breaks the connection: the zygote ends, and so do the waiting copies.
3. It lives below one reaper, and is spared by that reaper's sweeps.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from socket import socketpair
from typing import Any, NamedTuple

from rallypoint.base.kernel import memory_file
from rallypoint.base.poll import readable
from rallypoint.base.procfs import inherited_settings
from rallypoint.workers.preload.command import NeverForkable, NotForkable, PreloadCommand, parse_command
from rallypoint.workers.preload.copies import WaitingCopies
from rallypoint.workers.preload.environment import affinity_conflict, first_difference
from rallypoint.workers.reaper.client import (
    SENT_TO_ALL,
    ReaperClient,
    ReaperLost,
    StartedWorker,
    exit_words,
)
from rallypoint.workers.reaper.encoding import (
    encoded_arguments,
    encoded_environment,
    standard_descriptors,
    worker_settings,
)
from rallypoint.workers.reaper.protocol import Connection, parse

FORK_TIMEOUT = 5.0
"""Seconds for a copy to be made. It takes some milliseconds unless the machine is overloaded."""
_HOOK = os.path.join(os.path.dirname(__file__), "hook")
_MAX_STATUS_TEXT = 200


class ZygotePhase(Enum):
    """The phase of a zygote."""

    IMPORTING = "importing"
    READY = "ready"
    UNFORKABLE = "unforkable"
    """It must not be forked; `reason` says what the imports did."""
    LOST = "lost"
    """It has ended, or does not answer; `reason` says how, as far as that is known."""


class PreloadSpec(NamedTuple):
    """The imports of a zygote."""

    modules: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    """Modules that it would import automatically and leaves out."""
    per_worker_variables: tuple[str, ...] = ()
    """Names of variables that each worker has of its own: a zygote whose imports read one cannot be used."""
    reads_script: bool = False
    """Whether it also imports the modules that it finds in the script's source."""
    noted_in: str | None = None
    """The path of a file in which workers record what they import after the fork; None if they need not."""


class ZygoteClient:
    """One zygote.

    Args:
        reaper: starts it, and ends it with everything else.
        argv: the command of a worker.
        environ: the environment of the imports: what all workers will have in common.
        request: what it imports, and how.

    Raises:
        NotForkable: workers of this command cannot be forked.
        OSError: it cannot be started.
        ReaperLost: the reaper has ended.
    """

    def __init__(
        self, reaper: ReaperClient, argv: Sequence[str], environ: Mapping[str, str], request: PreloadSpec
    ) -> None:
        self.phase = ZygotePhase.IMPORTING
        self.reason = ""
        self.imported = 0
        """The number of modules that it has imported."""
        self.found: tuple[str, ...] = ()
        """Once it is ready: what it has imported, for messages."""
        self.failures: tuple[tuple[str, str], ...] = ()
        """Imports of the script that failed, and why."""
        self.module = ""
        """The module that makes it unforkable."""
        self.packages: tuple[str, ...] = ()
        """If it is unforkable: packages that it could have imported instead."""
        self.is_permanent = False
        """Whether it is lost because it ended during the imports, as another would."""
        self.reaper = reaper
        self._copies = WaitingCopies(reaper, FORK_TIMEOUT)
        self._copies_error = 0
        self._command = parse_command(argv)
        if os.pathsep in _HOOK or not os.path.isfile(os.path.join(_HOOK, "sitecustomize.py")):
            raise NotForkable(f"Rallypoint lies where no interpreter would find it by PYTHONPATH: {_HOOK}")
        self._environ = dict(environ)
        self._read: Mapping[str, str] = {}
        self._beginnings: Mapping[str, str] = {}
        self._cpus = os.sched_getaffinity(0)
        self._folder = _folder()
        self._pidfd = self._status_text = -1
        link, theirs = socketpair()
        self._link = Connection(link)
        try:
            self._status_text = memory_file("rallypoint-zygote-stderr")
            with theirs:
                self.pid = self._start(theirs.fileno(), argv)
            link.settimeout(FORK_TIMEOUT)
            command, python_path = self._command, environ.get("PYTHONPATH")
            lists = list(request.modules), list(request.left_out), list(request.per_worker_variables)
            encoded_path = None if python_path is None else os.fsencode(python_path)
            ignored = sorted(inherited_settings().ignored)
            script = (command.target, command.is_module) if request.reads_script else None
            self._link.send((*lists, command.path0, command.main_file, encoded_path, ignored, request.noted_in, script))
        except BaseException:
            theirs.close()
            self.close()
            raise

    def _start(self, link: int, argv: Sequence[str]) -> int:
        path = self._environ.get("PYTHONPATH")
        environ = {**self._environ, "PYTHONPATH": _HOOK + (os.pathsep + path if path else "")}
        output = memory_file("rallypoint-zygote-stdout")
        try:
            # A scheduler's signals to all processes must not end it; its copies get the mask of their own request.
            stdio = link, output, self._status_text
            started = self.reaper.spawn(argv, environ, stdio, excluded=True, blocked=SENT_TO_ALL)
        finally:
            os.close(output)
        self._pidfd = started.pidfd
        return started.pid

    def fds(self) -> list[int]:
        """Descriptors that become readable when there is something to `poll`."""
        return [] if self._link.fileno() < 0 else [self._link.fileno()]

    def poll(self) -> ZygotePhase:
        """Read its messages, or its end. Returns its phase now."""
        while self._link.fileno() >= 0 and (self._link.buffer or readable(self._link.fileno())):
            try:
                self._handle(self._next_message())
            except (OSError, EOFError):
                self._disconnect()
        return self.phase

    def _next_message(self) -> tuple[Any, ...]:
        while (message := parse(self._link.buffer)) is None:
            self._copies.received(self._link.receive())
        return message

    def _handle(self, message: tuple[Any, ...]) -> None:
        if message[0] == "ready":
            self.phase, self._read, self._beginnings, found, failures = ZygotePhase.READY, *message[1:]
            self.found, self.failures = tuple(found), tuple(failures)
        elif message[0] == "imported":
            self.imported += 1
        elif message[0] == "copy":
            self._copies.add(message[1])
        elif message[0] == "failed":
            self._copies.expected, self._copies_error = 0, message[1]
        elif message[0] == "unforkable":
            self.phase, self.module, self.reason, packages = ZygotePhase.UNFORKABLE, *message[1:]
            self.packages = tuple(packages)
            self.close()

    def request_copies(self, count: int) -> None:
        """Request copies, if fewer than this number wait or are on their way. Does not wait for them."""
        missing = count - len(self._copies) - self._copies.expected
        if missing <= 0 or self.phase is not ZygotePhase.READY:
            return
        try:
            self._link.send((missing,))
        except OSError as error:
            self._disconnect(silent=isinstance(error, TimeoutError))
        self._copies.expected += missing

    def fork(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        stdio: tuple[int | None, int | None, int | None],
        cpus: Collection[int] = (),
    ) -> StartedWorker:
        """Fork a worker from it; the arguments are those of `ReaperClient.spawn`.

        Raises:
            NotForkable: this worker would differ from a fresh interpreter, or none could be made; in the latter case
                the zygote may be lost.
            UserError: as `ReaperClient.spawn` raises it.
            ReaperLost: the reaper has ended.
        """
        self._check(parse_command(argv), environ, cpus)
        arguments, variables = encoded_arguments(argv), encoded_environment(environ)
        standard, places = standard_descriptors(*stdio)
        command = [os.fsdecode(each) for each in arguments], self._command.length
        message = (*command, list(variables.items()), worker_settings(places, cpus, ignored=self.reaper.ignored))
        try:
            folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise NotForkable(f"no copy could be requested: {error.strerror}") from None
        try:
            for _ in range(2):  # a copy that has waited for long may have been killed
                self._await_copy()
                started = self._copies.use(message, [folder, *standard])
                if started is not None:
                    return started
            raise NotForkable("the copy ended at once")
        finally:
            os.close(folder)

    def _await_copy(self) -> None:
        """Wait until there is a waiting copy. Raises NotForkable."""
        self._copies_error = 0
        self.request_copies(1)
        while not len(self._copies) and self.phase is ZygotePhase.READY and not self._copies_error:
            if readable(self._link.fileno(), FORK_TIMEOUT):
                self.poll()
            else:
                self._disconnect(silent=True)
        if self.phase is not ZygotePhase.READY:
            raise NotForkable(self.reason)
        if self._copies_error:
            raise NotForkable(f"no copy could be made: {os.strerror(self._copies_error)}")

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

    def close(self) -> None:
        """Release it; it ends then. Idempotent."""
        self._link.close()
        self._copies.close()
        for name in ("_pidfd", "_status_text"):
            fd = getattr(self, name)
            setattr(self, name, -1)
            if fd >= 0:
                os.close(fd)

    def _disconnect(self, silent: bool = False) -> None:
        """Break the connection to a zygote that has ended or does not answer, and record why."""
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
            end = f"; the end of its standard error: {last[-_MAX_STATUS_TEXT:]}" if last else ""
            self.reason += f" during the imports{end}"
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self.close()

    def _exit_words(self, importing: bool) -> str:
        if not readable(self._pidfd, 1.0):
            return "the connection to it broke"
        try:
            code = self.reaper.status(self.pid).code
        except ReaperLost:
            return "its reaper is lost"
        self.is_permanent = importing and code is not None and code >= 0
        return exit_words(code)


def _folder() -> tuple[int, int]:
    found = os.stat(".")
    return found.st_dev, found.st_ino
