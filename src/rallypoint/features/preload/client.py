"""Preloads for one agent: runs one zygote at a time, and decides whether to fork a worker from it.

If the first zygote is still importing when the first workers are due, they wait for it (`importing`), at most
`IMPORT_TIMEOUT` for each module: it began before them, and imports once instead of once per worker. Workers that start
while a later zygote imports are not forked. A zygote with the script's imports (`AUTO`) is for restarted workers: it
starts when the first workers make progress, or `AUTO_DELAY` after their start, and no worker waits for it.

Laws:

1. Nothing here blocks, except for the milliseconds to create a copy if none is waiting. A copy that does not arrive in
   time breaks the connection: the zygote and the waiting copies end.
2. If anything fails in a zygote, workers start without preloading, and one log line gives the reason.
3. A zygote that ended is replaced in the background, until preloading fails `_MAX_FAILURES` times without a forked
   worker in between. An unusable zygote is closed at once; another follows if there are other modules to import.
4. One copy waits for each worker of a start. Copies are created after the imports, and again `REFILL_DELAY` after each
   start of workers, so that no start waits while the kernel copies a zygote's page tables.
5. A zygote and its copies live below one reaper, whose sweeps spare them. A copy counts as a worker before it gets its
   request, so that its end cannot be missed.
6. Descriptors belong to their messages, in order, even if several are read at once.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from socket import socket, socketpair
from typing import Any, NamedTuple

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.errors import ResourceError
from rallypoint.base.kernel import memory_file, readable
from rallypoint.base.log import get_logger
from rallypoint.base.process_handle import ProcessHandle
from rallypoint.base.procfs import inherited_settings
from rallypoint.features.preload.forkable import (
    NeverForkable,
    NotForkable,
    affinity_conflict,
    first_difference,
    parse_command,
    untracked_read,
)
from rallypoint.workers.reaper.client import (
    SENT_TO_ALL,
    Command,
    ReaperClient,
    ReaperLost,
    encoded_command,
    exit_words,
    standard_descriptors,
    worker_settings,
)
from rallypoint.workers.reaper.protocol import Connection, parse

log = get_logger(__name__)

AUTO = "auto"
"""In place of a module: the modules that the script imports."""
AUTO_DELAY = 10.0
"""Seconds between the start of workers that report no progress and the import of their script's modules: by then they
have probably finished their own imports, and do not compete for processors."""
IMPORT_TIMEOUT = 20.0
"""Seconds that the first start of workers waits for one module's import."""
REFILL_DELAY = 2.0
"""Seconds between a start of workers and the creation of copies for the next start."""
FORK_TIMEOUT = 5.0
"""Seconds to create a copy, which takes some milliseconds unless the machine is overloaded."""
_MAX_FAILURES = 3
"""Maximum failures (ended zygotes, and workers that can never be forked) without a forked worker in between."""
_MAX_LEFT_OUT = 5
"""Maximum number of a script's modules that can prove unforkable, one zygote after another."""
_MAX_SHOWN = 8
_MAX_STATUS_TEXT = 200
_HOOK = os.path.join(os.path.dirname(__file__), "hook")


class PreloadManager:
    """The zygotes of one agent.

    Args:
        modules: the modules to import; `AUTO` means the script's imports.
        argv: the command of a worker.
        environ: the common environment of all workers.
        own: names of per-worker variables: a zygote whose imports read one is unusable.
        workers: the number of workers per start.
        clock: the clock of `wake_at`.
        progress: returns whether the current workers have made progress.
    """

    def __init__(
        self,
        modules: Sequence[str],
        argv: Sequence[str],
        environ: Mapping[str, str],
        own: Collection[str] = (),
        workers: int = 1,
        clock: Clock = SYSTEM_CLOCK,
        progress: Callable[[], bool] = lambda: False,
    ) -> None:
        self._auto = AUTO in modules
        self._imports = ZygoteImports(tuple(module for module in modules if module != AUTO), (), tuple(own), self._auto)
        self._argv = list(argv)
        self._environ = dict(environ)
        self._workers = workers
        self._clock = clock
        self._progress = progress
        self._reaper: ReaperClient | None = None
        """The reaper of the next zygote, which begins at `_begin_at`."""
        self._begin_at = self._refill_at = math.inf
        self._progress_at = 0.0
        self._zygote: Zygote | None = None
        self._first = not self._auto
        self._failures = 0
        self._given_up = False
        self._warned: set[str] = set()
        self.read_too_early: list[str] = []
        """Modules that read per-worker variables while being imported, with the place."""

    @property
    def pid(self) -> int | None:
        """Process id of the current zygote, for people; None for none."""
        return None if self._zygote is None else self._zygote.pid

    def ensure_zygote(self, reaper: ReaperClient) -> None:
        """Start a zygote below this reaper, if possible, before workers start. Does not wait for it."""
        if self._zygote is not None and self._zygote.reaper is not reaper:
            self.close()
        if self._zygote is not None:
            self._zygote.request_copies(self._workers)
        elif not self._given_up:
            (self._begin_later if self._auto else self._begin)(reaper)

    @property
    def importing(self) -> bool:
        """Whether workers that are about to start must wait."""
        return self._first and self._zygote is not None and self._zygote.phase is ZygotePhase.IMPORTING

    @property
    def busy(self) -> bool:
        """Whether a zygote is about to begin, or is importing."""
        return self._reaper is not None or (
            self._zygote is not None and self._zygote.phase in (ZygotePhase.IMPORTING, ZygotePhase.UNFORKABLE)
        )

    def fds(self) -> list[int]:
        return [] if self._zygote is None else self._zygote.fds()

    def wake_at(self) -> float:
        return self._progress_at + IMPORT_TIMEOUT if self.importing else min(self._refill_at, self._begin_at)

    def step(self) -> None:
        """Start the zygote if due, handle its events, and limit the workers' wait for it."""
        reaper = self._reaper
        if reaper is not None and (self._clock.monotonic() >= self._begin_at or self._progress()):
            self._reaper, self._begin_at = None, math.inf
            self._begin(reaper)
        self._poll()
        if self.importing and self._clock.monotonic() >= self._progress_at + IMPORT_TIMEOUT:
            self._first = False
            self._warn_not_forked(
                f"{self._module_names()} is not imported yet and has made no progress for {IMPORT_TIMEOUT:.0f} s; "
                "later workers may be forked"
            )

    def start(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        stdout: int | None,
        stderr: int | None,
        cpus: Collection[int] = (),
    ) -> ProcessHandle | None:
        """Fork a worker if it would be like a fresh interpreter; None if it must start without preloading.

        Raises:
            UserError: see `ReaperClient.spawn`.
            ReaperLost: the reaper has ended.
        """
        self._poll()
        zygote = self._zygote
        if zygote is None or zygote.phase is not ZygotePhase.READY:
            return None
        try:
            started = zygote.fork(argv, environ, (None, stdout, stderr), cpus)
        except NotForkable as reason:
            if zygote.poll() is ZygotePhase.LOST:
                self._on_lost(zygote)
            else:
                self._on_not_forkable(reason)
            return None
        self._failures = 0
        self._refill_at = self._clock.monotonic() + REFILL_DELAY
        return started

    def close(self) -> None:
        zygote, self._zygote = self._zygote, None
        self._refill_at = self._begin_at = math.inf
        self._reaper = None
        if zygote is not None:
            zygote.close()

    # Start and end of a zygote

    def _begin_later(self, reaper: ReaperClient) -> None:
        """Start a zygote after the next workers have started, if they can be forked at all."""
        try:
            parse_command(self._argv)
        except NotForkable as reason:
            self._give_up(str(reason))
            return
        self._reaper, self._begin_at = reaper, self._clock.monotonic() + AUTO_DELAY

    def _begin(self, reaper: ReaperClient) -> None:
        self._progress_at = self._clock.monotonic()
        unseen = untracked_read(self._imports.own)
        if unseen:
            self._give_up(f"{unseen}, and each worker has its own")
            return
        try:
            self._zygote = Zygote(reaper, self._argv, self._environ, self._imports)
        except ReaperLost:
            return  # another one follows, with `ensure_zygote`
        except (NotForkable, ResourceError) as reason:
            self._give_up(str(reason))
        except OSError as error:
            self._give_up(f"no process could be started to import {self._module_names()}: {error.strerror or error}")

    def _poll(self) -> None:
        zygote, refill_is_due = self._zygote, self._clock.monotonic() >= self._refill_at
        if refill_is_due:
            self._refill_at = math.inf
        if zygote is None or zygote.phase in (ZygotePhase.UNFORKABLE, ZygotePhase.LOST):
            return
        if refill_is_due:
            zygote.request_copies(self._workers)
        before, imported = zygote.phase, zygote.imported
        now = zygote.poll()
        if zygote.imported > imported:
            self._progress_at = self._clock.monotonic()
        if now is ZygotePhase.UNFORKABLE:
            self._retry_without_module(zygote)
        elif now is ZygotePhase.LOST:
            self._on_lost(zygote)
        elif now is not before:
            if self._auto:
                self._tell_found(zygote)
            log.info("%s is imported; workers will be forked from process %d", self._module_names(), zygote.pid)
            zygote.request_copies(self._workers)

    def _tell_found(self, zygote: Zygote) -> None:
        """Log the imports found in the script, and those that failed."""
        names = ", ".join(zygote.found[:_MAX_SHOWN]) or "only standard-library modules"
        more = len(zygote.found) - _MAX_SHOWN
        failed = "".join(f"; not {module}, for {why}" for module, why in zygote.failures[:_MAX_SHOWN])
        others = f" and {more} others" if more > 0 else ""
        log.warning("Preloaded for restarted workers: %s%s%s", names, others, failed)

    def _on_lost(self, zygote: Zygote) -> None:
        self._zygote, self._first = None, False
        if zygote.reaper.lost:
            return
        self._failures += 1
        what = f"the process {zygote.pid}, from which workers are forked, was lost: {zygote.reason}"
        if zygote.ends_by_itself:
            self._give_up(what)
        elif self._failures >= _MAX_FAILURES:
            self._give_up(f"{what}; so were {_MAX_FAILURES - 1} before it")
        else:
            self._warned.clear()
            self._warn_not_forked(f"{what}; this lasts until another process has imported {self._module_names()}")
            self._begin(zygote.reaper)

    def _retry_without_module(self, zygote: Zygote) -> None:
        """Retry without the module that makes a zygote unforkable, if others are left."""
        self._zygote, self._first = None, False
        if not zygote.module:
            self._give_up(zygote.reason)
            return
        why = f"{zygote.module} cannot be preloaded: {zygote.reason}"
        from rallypoint.features.preload.imports import READ_TOO_EARLY

        if zygote.reason.endswith(READ_TOO_EARLY):
            self.read_too_early.append(f"{zygote.module}: {zygote.reason.removesuffix(READ_TOO_EARLY).rstrip()}")
        left_out = (*self._imports.left_out, zygote.module)
        rest = [module for module in self._imports.modules if module != zygote.module]
        rest = rest or [package for package in zygote.packages if package not in left_out]
        if len(left_out) >= _MAX_LEFT_OUT if self._auto else not rest:
            self._give_up(f"{why}; remove it from --preload, or list only modules that do not need it")
            return
        self._imports = self._imports._replace(modules=tuple(rest), left_out=left_out)
        self._warn_not_forked(f"{why}; this lasts until {self._module_names()} is preloaded without it")
        self._begin(zygote.reaper)

    def _on_not_forkable(self, reason: NotForkable) -> None:
        self._warn_not_forked(str(reason), reason.about)
        self._failures += isinstance(reason, NeverForkable)
        if self._failures >= _MAX_FAILURES:
            log.info("the preload process %s cannot fork workers, so it is being stopped", self.pid)
            self._given_up = True
            self.close()

    def _give_up(self, why: str) -> None:
        self._given_up, self._zygote = True, None
        self._warn_not_forked(why)

    def _warn_not_forked(self, why: str, about: str = "") -> None:
        if (about or why) not in self._warned:
            self._warned.add(about or why)
            log.warning("Workers will start without preloading: %s", why)

    def _module_names(self) -> str:
        names = ", ".join(self._imports.modules)
        return " and ".join(filter(None, (names, "what the script imports"))) if self._auto else names


class ZygotePhase(Enum):
    IMPORTING = "importing"
    READY = "ready"
    UNFORKABLE = "unforkable"
    """It must not be forked; `reason` describes what the imports did."""
    LOST = "lost"
    """It ended or does not answer; `reason` says why, if known."""


class ZygoteImports(NamedTuple):
    """A zygote's imports: the named modules and, with `reads_script`, those in the script's source.

    `left_out` are automatic imports to omit; `own` names the variables that it must not read.
    """

    modules: tuple[str, ...]
    left_out: tuple[str, ...]
    own: tuple[str, ...]
    reads_script: bool


class _Copy(NamedTuple):
    handle: ProcessHandle
    link: Connection


class Zygote:
    """The agent's side of one zygote, and of its copies that wait to become workers. The constructor does not wait for
    it.

    Args:
        reaper: starts it, and ends it with everything else.
        argv: the command of a worker.
        environ: the environment of the imports: the common one of all workers.
        imports: its imports.

    Raises:
        NotForkable: workers of this command cannot be forked.
        OSError: it cannot start.
        ReaperLost: the reaper has ended.
    """

    def __init__(
        self, reaper: ReaperClient, argv: Sequence[str], environ: Mapping[str, str], imports: ZygoteImports
    ) -> None:
        self.phase = ZygotePhase.IMPORTING
        self.reason = ""
        self.imported = 0
        """The number of imported modules."""
        self.found: tuple[str, ...] = ()
        """Once it is ready, its imports for messages."""
        self.failures: tuple[tuple[str, str], ...] = ()
        """Failed imports of the script, with reasons."""
        self.module = ""
        """Module that makes it unforkable."""
        self.packages: tuple[str, ...] = ()
        """If unforkable, packages that it could have imported instead."""
        self.ends_by_itself = False
        """Whether it ended during the imports, as another zygote would."""
        self.reaper = reaper
        self.copies: deque[_Copy] = deque()
        """The waiting copies; each ends when it is dropped or the agent is gone."""
        self._expected = 0
        """How many requested copies have not arrived."""
        self._copies_error = 0
        self._descriptors: list[int] = []
        command = parse_command(argv)
        self._command, self._length = list(argv[: command.length]), command.length
        if os.pathsep in _HOOK or not os.path.isfile(os.path.join(_HOOK, "sitecustomize.py")):
            raise NotForkable(f"Rallypoint is installed where PYTHONPATH cannot point to it: {_HOOK}")
        self._environ = dict(environ)
        self._read: Mapping[str, str] = {}
        self._cpus = os.sched_getaffinity(0)
        self._folder = _folder()
        self._process: ProcessHandle | None = None
        self._status_text = -1
        link, theirs = socketpair()
        self._link = Connection(link)
        try:
            self._status_text = memory_file("rallypoint-zygote-stderr")
            with theirs:
                self.pid = self._start(theirs.fileno(), argv)
            link.settimeout(FORK_TIMEOUT)
            python_path = environ.get("PYTHONPATH")
            encoded_path = None if python_path is None else os.fsencode(python_path)
            ignored = sorted(inherited_settings().ignored)
            script = (command.target, command.is_module) if imports.reads_script else None
            lists = list(imports.modules), list(imports.left_out), list(imports.own)
            self._link.send((*lists, command.path0, command.main_file, encoded_path, ignored, script))
        except BaseException:
            theirs.close()
            self.close()
            raise

    def _start(self, link: int, argv: Sequence[str]) -> int:
        path = self._environ.get("PYTHONPATH")
        environ = {**self._environ, "PYTHONPATH": _HOOK + (os.pathsep + path if path else "")}
        output = memory_file("rallypoint-zygote-stdout")
        try:
            # A scheduler's signals to all processes must not end the zygote; its copies get their request's signal
            # mask.
            command = Command(argv, stdio=(link, output, self._status_text))
            (self._process,) = self.reaper.spawn([command], environ, excluded=True, blocked=SENT_TO_ALL)
        finally:
            os.close(output)
        return self._process.pid

    def fds(self) -> list[int]:
        return [] if self._link.socket.fileno() < 0 else [self._link.socket.fileno()]

    def poll(self) -> ZygotePhase:
        """Read its messages, or notice its end, without waiting. Returns its current phase."""
        while self._link.socket.fileno() >= 0 and (self._link.buffer or readable(self._link.socket.fileno())):
            try:
                self._handle(self._next_message())
            except (OSError, EOFError):
                self._disconnect()
        return self.phase

    def _next_message(self) -> tuple[Any, ...]:
        while (message := parse(self._link.buffer)) is None:
            self._descriptors += self._link.receive()
        return message

    def _handle(self, message: tuple[Any, ...]) -> None:
        if message[0] == "ready":
            self.phase, self._read, found, failures = ZygotePhase.READY, *message[1:]
            self.found, self.failures = tuple(found), tuple(failures)
        elif message[0] == "imported":
            self.imported += 1
        elif message[0] == "copy":
            self._add_copy(message[1])
        elif message[0] == "failed":
            self._expected, self._copies_error = 0, message[1]
        elif message[0] == "unforkable":
            self.phase, self.module, self.reason, packages = ZygotePhase.UNFORKABLE, *message[1:]
            self.packages = tuple(packages)
            self.close()

    # Copies

    def request_copies(self, count: int) -> None:
        """Request copies if fewer than `count` are waiting or requested. Does not wait for them."""
        missing = count - len(self.copies) - self._expected
        if missing <= 0 or self.phase is not ZygotePhase.READY:
            return
        try:
            self._link.send((missing,))
        except OSError as error:
            self._disconnect(silent=isinstance(error, TimeoutError))
        self._expected += missing

    def _add_copy(self, pid: int) -> None:
        self._expected -= 1
        if not self._descriptors:  # the kernel drops descriptors that do not fit
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        link = socket(fileno=self._descriptors.pop(0))
        link.settimeout(FORK_TIMEOUT)
        handle = None
        try:
            with contextlib.suppress(ReaperLost):  # then all its processes are gone
                handle = self.reaper.adopt_waiting(pid)
        finally:
            if handle is None:
                link.close()
        if handle is not None:
            self.copies.append(_Copy(handle, Connection(link)))

    def fork(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        stdio: tuple[int | None, int | None, int | None],
        cpus: Collection[int] = (),
    ) -> ProcessHandle:
        """Fork a worker; for the arguments see `ReaperClient.spawn`.

        Raises:
            NotForkable: this worker would differ from a fresh interpreter, or could not be created; then the zygote
                might be lost.
            UserError: see `ReaperClient.spawn`.
            ReaperLost: the reaper has ended.
        """
        self._check(argv, environ, cpus)
        arguments, variables = encoded_command(argv, environ)
        command = [os.fsdecode(argument) for argument in arguments], self._length
        try:
            folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise NotForkable(f"no copy could be requested: {error.strerror}") from None
        try:
            sent = {folder: 0}
            places = standard_descriptors(sent, *stdio)
            settings = worker_settings(ignored=self.reaper.ignored)
            message = (*command, list(variables.items()), settings, places, sorted(cpus))
            for _ in range(2):  # a copy that waited long might have been killed
                self._await_copy()
                handle = self._use_copy(message, [*sent])
                if handle is not None:
                    return handle
            raise NotForkable("the copy exited immediately")
        finally:
            os.close(folder)

    def _check(self, argv: Sequence[str], environ: Mapping[str, str], cpus: Collection[int]) -> None:
        if list(argv[: self._length]) != self._command:
            raise NeverForkable("this worker's command differs from that of the first worker")
        if _folder() != self._folder:
            raise NeverForkable("the working folder has changed since the modules were imported")
        differs = first_difference(self._environ, environ, self._read)
        if differs:
            raise NeverForkable(differs.text, about=differs.name)
        why = affinity_conflict(self._cpus, cpus, environ)
        if why:
            raise NeverForkable(why)

    def _await_copy(self) -> None:
        """Wait for a copy. Raises NotForkable."""
        self._copies_error = 0
        self.request_copies(1)
        while not self.copies and self.phase is ZygotePhase.READY and not self._copies_error:
            if readable(self._link.socket.fileno(), FORK_TIMEOUT):
                self.poll()
            else:
                self._disconnect(silent=True)
        if self.phase is not ZygotePhase.READY:
            raise NotForkable(self.reason)
        if self._copies_error:
            raise NotForkable(f"no copy could be made: {os.strerror(self._copies_error)}")

    def _use_copy(self, message: tuple[Any, ...], descriptors: Sequence[int]) -> ProcessHandle | None:
        """Turn a copy into this request's worker; None if all waiting copies ended."""
        while self.copies:
            handle, link = self.copies.popleft()
            used = False
            try:
                # The connection shows that the copy is still alive after its adoption. So its pid was not reused
                # before, and its handle, which the reaper opens by the pid, is right.
                if self.reaper.adopt(handle.pid) and not readable(link.socket.fileno(), events=0):
                    with contextlib.suppress(OSError):  # it has ended
                        link.send(message, descriptors)
                        used = True
            finally:
                link.close()
                if not used:
                    handle.close()
            if used:
                return handle
        return None

    # End of a zygote

    def close(self) -> None:
        self._link.close()
        while self.copies:
            handle, link = self.copies.popleft()
            link.close()
            handle.close()
        if self._process is not None:
            self._process.close()
        for fd in (*self._descriptors, self._status_text):
            if fd >= 0:
                os.close(fd)
        self._descriptors, self._status_text = [], -1

    def _disconnect(self, silent: bool = False) -> None:
        """Break the connection to a zygote that ended or does not answer, and record the reason."""
        if self.phase is ZygotePhase.LOST:
            return
        importing = self.phase is ZygotePhase.IMPORTING
        self.phase = ZygotePhase.LOST
        self.reason = f"it did not answer within {FORK_TIMEOUT:.0f} s" if silent else self._exit_words(importing)
        if importing and not silent:
            text = os.pread(self._status_text, os.fstat(self._status_text).st_size, 0).decode(errors="replace")
            last = next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "")
            end = f"; the end of its standard error: {last[-_MAX_STATUS_TEXT:]}" if last else ""
            self.reason += f" during the imports{end}"
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.send_signal(signal.SIGKILL)
        self.close()

    def _exit_words(self, importing: bool) -> str:
        if self._process is None or not readable(self._process.fileno(), 1.0):
            return "the connection to it broke"
        try:
            code = self.reaper.status(self.pid).code
        except ReaperLost:
            return "its reaper is lost"
        self.ends_by_itself = importing and code is not None and code >= 0
        return exit_words(code)


def _folder() -> tuple[int, int]:
    found = os.stat(".")
    return found.st_dev, found.st_ino
