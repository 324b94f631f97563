"""The folder in which notices for the workers of one node, and their acknowledgements, are stored
(`rallypoint.notices`).

Laws:

1. The folder has a different, unguessable name for each start of workers, and is made when there is something to post,
   or by a worker that reports progress, or that it can go on in its process when a round ends: a job without these
   touches no disk. Who finds it there uses it only if it is private (`base/private_files.py`): its name is in the
   workers' environment, which others may learn.
2. `WorkersReady` and the timer `NOTICE` come once for each notice that is waited for.
3. When the workers are gone, so is the folder. It stays while some of them go on in their processes, and newly started
   workers find it too; files that the others have left in it are removed first (`workers/resumable.py`).
4. Each notice has a number, which its acknowledgements carry. One that arrives after its notice was withdrawn has no
   effect; one for a notice that was replaced by another counts for that too.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Collection, Iterator

from rallypoint.agent.sources import Source
from rallypoint.agent.steps import Timer, TimerFired, WorkersReady
from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.errors import UserError
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger
from rallypoint.base.private_files import is_private, make_private, replace_file
from rallypoint.notices import ACK_PREFIX, NOTICE_FILE
from rallypoint.workers.logs.specs import temporary_folder

if TYPE_CHECKING:
    from rallypoint.base.inotify import Inotify

log = get_logger(__name__)

_POLL = 1.0
"""Seconds between polls if inotify is not available."""


class NoticeDirectory(Source):
    """The only owner of the folder. Nothing here waits."""

    def __init__(self, running: Callable[[], Collection[int]], clock: Clock = SYSTEM_CLOCK) -> None:
        """Make no folder yet.

        Args:
            running: returns the local ranks of the workers that have not ended: only they need to acknowledge.
            clock: the workers' own CLOCK_MONOTONIC, except in tests.
        """
        self._running = running
        self._clock = clock
        self._folder = ""
        self._created = False
        self._inotify: Inotify | None = None
        self._reason = ""
        self._expires_at = math.inf
        self._poll_at = math.inf
        self._awaits_acknowledgements = False
        self._seen = True
        self._number = 0
        self._first = 1
        """The number of the first notice whose acknowledgements count."""

    def reset(self, *, keep: bool = False) -> str:
        """Begin with new workers.

        Args:
            keep: whether some workers go on that know the folder.

        Returns:
            The folder for their notices; empty if there is no space for one.
        """
        self.clear(keep=keep)
        if keep:
            return self._folder
        try:
            self._folder = os.path.join(temporary_folder(), f"rallypoint-notices-{os.urandom(16).hex()}")
        except UserError as error:
            log.warning("workers will see no notices: %s", error)
            self._folder = ""
        return self._folder

    def post(self, reason: str, node: str, round_: int, seconds: float, *, waits: bool) -> None:
        """Post a notice, which replaces any other. Earlier acknowledgements count for it too.

        Args:
            reason: `SCALE` or `PREEMPTION`.
            node: the node that will be taken away; empty for this one.
            round_: the round that will end.
            seconds: the time that the workers have. Among notices for the same reason, the earliest deadline counts.
            waits: whether `step` returns acknowledgements and the end of the time.
        """
        over_at = self._clock.monotonic() + seconds
        if waits and reason == self._reason:
            over_at = min(over_at, self._expires_at)
        self._seen = True
        self._number += 1
        try:
            self._write({"reason": reason, "node": node, "round": round_, "deadline": over_at, "number": self._number})
        except OSError as error:
            log.warning("the workers cannot be notified of the %s, and are not waited for: %s", reason, error)
            self._seen = False
        self._awaits_acknowledgements = waits
        self._reason = reason if waits else ""
        self._expires_at = over_at if waits else math.inf
        self._poll_at = self._clock.monotonic() if waits else math.inf  # they may have acknowledged another one before

    def withdraw(self) -> None:
        """Remove the notice and its acknowledgements."""
        self._awaits_acknowledgements, self._reason = False, ""
        self._first = self._number + 1
        self._expires_at = self._poll_at = math.inf
        if self._created:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._folder, NOTICE_FILE))

    def clear(self, *, keep: bool = False) -> None:
        """The workers are gone: remove everything; if some go on (`keep`), the notice only. Idempotent."""
        self.withdraw()
        if keep:
            return
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None
        if self._created or (self._folder and is_private(self._folder)):  # or a worker has made it
            from shutil import rmtree

            rmtree(self._folder, ignore_errors=True)
            self._created = False

    def any_acknowledged(self) -> bool:
        """Whether a worker has acknowledged a notice that counts."""
        return self._created and bool(self._acknowledged())

    # For the loop

    def fds(self) -> list[int]:
        return [self._inotify.fileno()] if self._awaits_acknowledgements and self._inotify is not None else []

    def wake_at(self) -> float:
        return min(self._expires_at, self._poll_at)

    def step(self) -> Iterator[WorkersReady | TimerFired]:
        now = self._clock.monotonic()
        over = now >= self._expires_at
        if self._awaits_acknowledgements:
            if self._inotify is not None:
                self._inotify.changed()
            self._poll_at = math.inf if self._inotify is not None else now + _POLL
            acknowledged = self._seen and not set(self._running()) - self._acknowledged()
            if over or not self._seen or acknowledged:
                self._awaits_acknowledgements = False
                self._poll_at = math.inf
                yield WorkersReady(is_late=over and not acknowledged)
        if over:
            self._expires_at = math.inf
            yield TimerFired(Timer.NOTICE)

    # Inside

    def _write(self, notice: dict[str, object]) -> None:
        import json

        if not self._folder:
            raise OSError("there is no folder for it")
        if not self._created:
            make_private(self._folder)  # or a worker that reports progress has made it
            self._created = True
            self._inotify = self._watch()
        replace_file(os.path.join(self._folder, NOTICE_FILE), json.dumps(notice).encode())

    def _watch(self) -> Inotify | None:
        from rallypoint.base.inotify import CREATED, Inotify

        news = None
        try:
            news = Inotify()
            news.watch(self._folder, CREATED)
        except OSError as error:
            log.warning("acknowledgements are polled every %s s instead of at each: %s", _POLL, error)
            if news is not None:
                news.close()
            return None
        return news

    def _acknowledged(self) -> set[int]:
        """Local ranks that have acknowledged the notice."""
        try:
            names = os.listdir(self._folder) if self._created else []
        except OSError:
            return set()
        found = (name.removeprefix(ACK_PREFIX).partition(".") for name in names if name.startswith(ACK_PREFIX))
        answers = ((rank, number) for rank, _, number in found if rank.isdecimal() and number.isdecimal())
        return {int(rank) for rank, number in answers if self._first <= int(number) <= self._number}
