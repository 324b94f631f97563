"""Preloading for one agent: keeps one zygote at a time, and decides whether a worker is forked from it.

If the first zygote is still importing when the first workers are due to start, they wait for it (`importing`), at most
`IMPORT_TIMEOUT` for each module: it imports what they would and has begun before them, and it imports once and not once
for each worker. Workers that start while a later zygote imports are not forked. A zygote that takes its imports from
the script (`AUTO`) is for restarted workers: it begins when the first workers make progress, or `AUTO_DELAY` after they
were started, and no worker waits for it.

Laws:

1. Nothing here blocks, except for the milliseconds that a copy takes if none is waiting.
2. If anything fails in a zygote, workers start without preloading, and one log line says why.
3. A zygote that has ended is replaced by another in the background, unless several in a row were never used.
4. One that can never be used is closed at once; another follows it if that has something left to import.
5. As many copies wait as workers start at a time: they are made when the imports are done, and again `REFILL_DELAY`
   after workers were started, so that no start waits for the kernel to copy a zygote's page tables.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.errors import ResourceError
from rallypoint.base.kernel import memory_file
from rallypoint.base.log import get_logger
from rallypoint.workers.preload.command import NeverForkable, NotForkable, parse_command
from rallypoint.workers.preload.environment import untracked_read
from rallypoint.workers.preload.zygote_client import PreloadSpec, ZygoteClient, ZygotePhase
from rallypoint.workers.reaper.client import ReaperClient, ReaperLost, StartedWorker

log = get_logger(__name__)

AUTO = "auto"
"""In place of a module: the modules that the script imports."""
AUTO_DELAY = 10.0
"""Seconds from the start of workers that report no progress to the import of what their script imports: by then they
have most likely finished their own imports, so that it takes no processor from them while they start.
"""
_MAX_LEFT_OUT = 5
"""The number of a script's modules that may turn out unforkable, one zygote after the other."""
_MAX_SHOWN = 8
IMPORT_TIMEOUT = 20.0
"""Seconds that the first start of workers waits for the import of a module."""
REFILL_DELAY = 2.0
"""Seconds from a start of workers until the copies for the next workers are made."""
_MAX_DEATHS = 3
"""The number of zygotes in a row that may end without a worker forked from them."""


class PreloadManager:
    """The zygotes of one agent.

    Args:
        modules: what they import; `AUTO` among these stands for the imports of the script.
        argv: the command of a worker.
        environ: the environment that all workers have in common.
        own: names of the variables that each worker has of its own.
        workers: how many start at a time.
        clock: of `wake_at`.
        progress: whether the present workers have made progress.
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
        named = tuple(each for each in modules if each != AUTO)
        self._preload = PreloadSpec(named, per_worker_variables=tuple(own), reads_script=self._auto)
        self._progress = progress
        self._begin_at = math.inf
        self._reaper: ReaperClient | None = None
        """The reaper below which the next zygote begins at that time."""
        self._argv = list(argv)
        self._environ = dict(environ)
        self._workers = workers
        self._clock = clock
        self._never_forkable_count = 0
        self._late_imports: _LateImportsFile | None = None
        self._zygote: ZygoteClient | None = None
        self._given_up = False
        self._progress_at = 0.0
        self._refill_at = math.inf
        self._first = not self._auto
        self._deaths = 0
        self._warned: set[str] = set()

    @property
    def pid(self) -> int | None:
        """The process id of the present zygote, for people; None if there is none."""
        return None if self._zygote is None else self._zygote.pid

    def ensure_zygote(self, reaper: ReaperClient) -> None:
        """Start a zygote below this reaper, if possible, before workers start. Does not wait for it."""
        if self._zygote is not None and self._zygote.reaper is not reaper:
            self.close()
        if self._zygote is None and not self._given_up:
            (self._begin_later if self._auto else self._begin)(reaper)
            return
        if self._zygote is not None:
            self._zygote.request_copies(self._workers)
        if self._late_imports is not None:
            self._late_imports.log()

    @property
    def importing(self) -> bool:
        """Whether workers that are about to start must wait."""
        waits = self._first_imports
        if waits and self._clock.monotonic() >= self._progress_at + IMPORT_TIMEOUT:
            self._first = waits = False
            self._warn_not_forked(
                f"{self._module_names()} is not imported, and has made no progress for {IMPORT_TIMEOUT:.0f} s; "
                "later workers may be forked"
            )
        return waits

    @property
    def _first_imports(self) -> bool:
        return self._first and self._zygote is not None and self._zygote.phase is ZygotePhase.IMPORTING

    def fds(self) -> list[int]:
        """Descriptors that become readable when there is something to do."""
        return [] if self._zygote is None else self._zygote.fds()

    def wake_at(self) -> float:
        """When there is something to do, on the monotonic clock; infinite for never."""
        return self._progress_at + IMPORT_TIMEOUT if self._first_imports else min(self._refill_at, self._begin_at)

    def step(self) -> None:
        """Start the zygote if that is due, and handle its events."""
        reaper = self._reaper
        if reaper is not None and (self._clock.monotonic() >= self._begin_at or self._progress()):
            self._reaper, self._begin_at = None, math.inf
            self._begin(reaper)
        self._poll()

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
            self._on_zygote_lost(zygote)
        elif now is not before:
            if self._auto:
                self._tell_found(zygote)
            log.info("%s is imported; workers are forked from process %d", self._module_names(), zygote.pid)
            zygote.request_copies(self._workers)

    def start(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        stdout: int | None,
        stderr: int | None,
        cpus: Collection[int] = (),
    ) -> StartedWorker | None:
        """Fork a worker, if it can be like a fresh interpreter; None if it must start without preloading.

        Raises:
            UserError: as `ReaperClient.spawn` raises it.
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
                self._on_zygote_lost(zygote)
            else:
                self._on_not_forkable(reason)
            return None
        self._deaths = self._never_forkable_count = 0
        self._refill_at = self._clock.monotonic() + REFILL_DELAY
        return started

    def close(self) -> None:
        """End the zygote, as at the end of its reaper. Workers forked from it go on. Idempotent."""
        zygote, self._zygote = self._zygote, None
        self._refill_at = self._begin_at = math.inf
        self._reaper = None
        if zygote is not None:
            zygote.close()
        if self._late_imports is not None:
            self._late_imports.log()
            self._late_imports.close()
            self._late_imports = None

    # Inside

    def _begin_later(self, reaper: ReaperClient) -> None:
        """Begin when the workers that are about to start have started, if they can be forked at all."""
        try:
            parse_command(self._argv)
        except NotForkable as reason:
            self._give_up(str(reason))
            return
        self._reaper, self._begin_at = reaper, self._clock.monotonic() + AUTO_DELAY

    def _tell_found(self, zygote: ZygoteClient) -> None:
        """Log which imports were read from the script, and which of these failed."""
        names = ", ".join(zygote.found[:_MAX_SHOWN]) or "nothing but modules of the standard library"
        more = len(zygote.found) - _MAX_SHOWN
        failed = "".join(f"; not {module}, for {why}" for module, why in zygote.failures[:_MAX_SHOWN])
        others = f" and {more} others" if more > 0 else ""
        log.warning("Preloaded for workers that are started again: %s%s%s", names, others, failed)

    def _begin(self, reaper: ReaperClient) -> None:
        self._progress_at = self._clock.monotonic()
        unseen = untracked_read(self._preload.per_worker_variables)
        if unseen:
            self._give_up(f"{unseen}, and each worker has its own")
            return
        if self._late_imports is None and log.isEnabledFor(logging.DEBUG):
            self._late_imports = _LateImportsFile()
        request = self._preload._replace(noted_in=None if self._late_imports is None else self._late_imports.path)
        try:
            self._zygote = ZygoteClient(reaper, self._argv, self._environ, request)
        except NotForkable as reason:
            self._give_up(str(reason))
        except ReaperLost:
            return  # another one follows, and `prepare` with it
        except ResourceError as reason:
            self._give_up(str(reason))
        except OSError as error:
            self._give_up(f"no process could be started to import {self._module_names()}: {error.strerror or error}")

    def _on_zygote_lost(self, zygote: ZygoteClient) -> None:
        self._zygote, self._first = None, False
        if zygote.reaper.lost:
            return
        self._deaths += 1
        what = f"the process {zygote.pid}, from which workers are forked, is lost: {zygote.reason}"
        if zygote.is_permanent:
            self._give_up(what)
            return
        if self._deaths >= _MAX_DEATHS:
            self._give_up(f"{what}; so were {_MAX_DEATHS - 1} before it")
            return
        self._warned.clear()
        self._warn_not_forked(f"{what}; they do until another has imported {self._module_names()}")
        self._begin(zygote.reaper)

    def _retry_without_module(self, zygote: ZygoteClient) -> None:
        """Go on without the module that makes a zygote unforkable, if that leaves any."""
        self._zygote, self._first = None, False
        if not zygote.module:
            self._give_up(zygote.reason)
            return
        why = f"{zygote.module} cannot be preloaded: {zygote.reason}"
        left_out = (*self._preload.left_out, zygote.module)
        rest = [each for each in self._preload.modules if each != zygote.module]
        rest = rest or [each for each in zygote.packages if each not in left_out]
        if len(left_out) >= _MAX_LEFT_OUT if self._auto else not rest:
            self._give_up(f"{why}; take it out of --preload, or name there what does without it")
            return
        self._preload = self._preload._replace(modules=tuple(rest), left_out=left_out)
        self._warn_not_forked(f"{why}; they do until {self._module_names()} is preloaded without it")
        self._begin(zygote.reaper)

    def _on_not_forkable(self, reason: NotForkable) -> None:
        """Handle a worker that cannot be forked; if this affects all that start at a time, it does so each time."""
        self._warn_not_forked(str(reason), reason.about)
        self._never_forkable_count += isinstance(reason, NeverForkable)
        if self._never_forkable_count >= self._workers:
            log.info("No worker can be forked from process %s, which ends", self.pid)
            self._given_up = True
            self.close()

    def _give_up(self, why: str) -> None:
        self._given_up, self._zygote = True, None
        self._warn_not_forked(why)

    def _warn_not_forked(self, why: str, about: str = "") -> None:
        if (about or why) not in self._warned:
            self._warned.add(about or why)
            log.warning("Workers start without preloading: %s", why)

    def _module_names(self) -> str:
        names = ", ".join(self._preload.modules)
        return " and ".join(filter(None, (names, "what the script imports"))) if self._auto else names


class _LateImportsFile:
    """A file in memory in which workers note what they import after the fork."""

    def __init__(self) -> None:
        self._fd = memory_file("rallypoint-late-imports")
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Release it. Call this once."""
        os.close(self._fd)

    def log(self) -> None:
        """Log its contents, and clear it."""
        from rallypoint.workers.preload.late_imports import summary

        words = summary(os.pread(self._fd, os.fstat(self._fd).st_size, 0).decode(errors="replace"))
        os.ftruncate(self._fd, 0)
        if words:
            log.debug("Workers imported after the fork: %s; to preload these too, name them in --preload", words)
