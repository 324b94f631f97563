"""Tracks how long this node's workers have been inactive, and reports this to the coordinator (`--hang-timeout`;
without it, `--silence-timeout`).

Signs of activity are: any output of a worker, a call of `notices.progress` (even with the same step), a change in the
progress file, a file that grows like a checkpoint being saved, and the end of a worker. The load of a processor or a
GPU proves nothing, because a worker might spin while it waits for a collective. If only silence is reported, any change
in a worker's Python calls or their variables is also a sign: it is computing something.

Laws:

1. Log files and the progress file might be on a hung disk, so a thread checks them, and the loop uses its results.
2. No sign may be missed: a node is quiet only after a look that began after the timeout. A look that does not return
   within the timeout counts as having found nothing.
3. Until a worker reports progress twice, a round gets three times the timeout from its start: the first steps are slow,
   and a first report can precede them.
4. Time without looks, as on a suspended machine, does not count.
5. If the workers' output is not visible and they report no progress, this node is never quiet.
6. Only changes are reported to the coordinator: quiet, and no longer quiet.
7. Workers' computing child processes (a compiler, a tokenizer) also count, but for at most three times the timeout
   after the last sign: they might be ranks of an inner launcher, which also spin.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection

from rallypoint.agent.folder import Reached, steps_of_workers
from rallypoint.agent.sources import Source
from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.light_typing import TYPE_CHECKING, NamedTuple
from rallypoint.base.log import get_logger
from rallypoint.base.side_thread import start_thread
from rallypoint.control.membership.state import ReportQuiet
from rallypoint.features.hangs.activity import Activity, ActivityProbe, ticks_of
from rallypoint.features.hangs.rules import GRACE

if TYPE_CHECKING:
    from rallypoint.agent.workers import WorkerController

log = get_logger(__name__)

_LOOKS = 8
"""Number of looks per timeout."""
_SHORTEST, _LONGEST = 0.05, 15.0
"""Minimum and maximum seconds between looks."""


class Seen(NamedTuple):
    """Visible traces of the workers."""

    output: object
    """None if not visible."""
    calls: tuple[Reached | None, ...]
    file: object
    """None without a progress file, or before the first look at it."""
    activity: Activity = Activity()
    python: object = None
    """Changes with a worker's Python calls and their variables; None if not examined."""

    @property
    def signs(self) -> object:
        """A value that differs between two looks if there was a sign of activity."""
        return self.output, self.calls, self.file, self.activity.grown, self.python


class RoundSigns:
    """Activity of one round's workers. All times are in seconds on the monotonic clock."""

    def __init__(
        self, round_: int, look: Callable[[], Seen], timeout: float, now: float, patience: int = GRACE
    ) -> None:
        self.round = round_
        self._look = look
        self._timeout = timeout
        self._patience = patience
        """Factor of the timeout until the workers report progress."""
        self._started_at = self._sign_at = self._looked_at = now
        self._looking_since: float | None = None
        self._busy_at = -math.inf
        """When the workers' children last computed."""
        self._reported = False
        """Whether any worker reported progress."""
        self._progressed = False
        """Whether a worker reported progress again."""
        self._seen: Seen | None = None

    def look(self, clock: Clock) -> None:
        """Look once; might hang if the disk does."""
        self._looking_since = clock.monotonic()
        seen, before = self._look(), self._seen
        now = clock.monotonic()
        self._seen = seen
        wrote = before is not None and before.file is not None and seen.file != before.file
        self._reported |= wrote or any(seen.calls)
        self._progressed |= wrote or any(call is not None and call.at > call.first_at for call in seen.calls)
        if before is not None and seen.signs != before.signs:
            self._sign_at = now
        if seen.activity.is_busy:
            self._busy_at = now
        self._looked_at, self._looking_since = now, None

    def sign(self, now: float) -> None:
        """Note a sign of activity that no look shows."""
        self._sign_at = now

    def skip(self, seconds: float, now: float) -> None:
        """Do not count this many seconds without looks, unless the thread found a sign."""
        self._started_at = min(self._started_at + seconds, now)
        self._sign_at = min(self._sign_at + seconds, now)

    def is_quiet(self, now: float) -> bool:
        """Whether the workers have been inactive for the timeout."""
        over_at = self._sign_at + self._timeout
        over_at = max(over_at, min(self._busy_at + self._timeout, self._sign_at + GRACE * self._timeout))
        if not self._progressed:
            over_at = max(over_at, self._started_at + self._patience * self._timeout)
        if now < over_at or not self._can_be_seen():
            return False
        since = self._looking_since
        return self._looked_at >= over_at or (since is not None and now - since >= self._timeout)

    def _can_be_seen(self) -> bool:
        return self._reported or self._seen is None or self._seen.output is not None


class HangWatch(Source):
    """The hang watch of one agent, stepped by its loop. Never waits.

    Args:
        timeout: seconds of inactivity after which this node is quiet.
        workers: this node's workers.
        reports_only: whether only a log line follows. Then running Python code is also a sign, and the start gets no
            extra time.
        clock: CLOCK_MONOTONIC, except in tests.
    """

    def __init__(
        self, timeout: float, workers: WorkerController, clock: Clock = SYSTEM_CLOCK, *, reports_only: bool = False
    ) -> None:
        self._timeout = timeout
        self._reports_only = reports_only
        self.on_look: Callable[[], None] = lambda: None
        """Called on the thread with each look."""
        self._workers = workers
        self._clock = clock
        self._every = min(max(timeout / _LOOKS, _SHORTEST), _LONGEST)
        self._signs: RoundSigns | None = None
        self._running: Collection[int] = ()
        self._quiet = False
        self._step_at = math.inf
        self._stepped_at = 0.0
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._warned = False

    def begin_round(self, round_: int) -> None:
        """Start to watch a round's workers, which have been started."""
        now = self._clock.monotonic()
        patience = 1 if self._reports_only else GRACE
        self._signs = RoundSigns(round_, self._looker(), self._timeout, now, patience)
        self._quiet, self._running = False, tuple(self._workers.running())
        self._stepped_at, self._step_at = now, now + self._every
        self._start_looking()

    def _start_looking(self) -> None:
        if self._thread is None:
            self._thread = start_thread(self._run, "rallypoint-hangs")

    def end_round(self) -> None:
        """Stop watching: the workers are about to stop. Idempotent."""
        self._signs, self._step_at = None, math.inf

    def close(self) -> None:
        """Close at the end of the run. Idempotent; does not wait for a disk that might hang."""
        self.end_round()
        self._ending.set()

    # Interface to the loop

    def wake_at(self) -> float:
        return self._step_at

    def step(self) -> None:
        """Report to the coordinator when the workers become quiet or active again."""
        now = self._clock.monotonic()
        signs = self._signs
        if signs is None or now < self._step_at:
            return
        self._start_looking()  # if no thread could start before
        late = now - self._stepped_at - 2 * self._every
        if late > max(1.0, self._every):
            signs.skip(late, now)
        self._stepped_at, self._step_at = now, now + self._every
        running = tuple(self._workers.running())
        if running != self._running:
            self._running = running
            signs.sign(now)
        quiet = signs.is_quiet(now)
        if quiet != self._quiet:
            self._quiet = quiet
            self._workers.rendezvous.send(ReportQuiet(signs.round, quiet))

    # Internals

    def _looker(self) -> Callable[[], Seen]:
        """Return the function that looks at this round's workers, on the thread."""
        workers, group = self._workers, self._workers.group
        context, folder, ranks = workers.pcontext, group.notices, len(group.workers)
        marks = None if context is None else context.output_marks()
        pids = dict if context is None else context.program_pids  # which can start later than its worker
        probe = ActivityProbe(pids().values())
        if marks is None and not self._reports_only:
            self._warn_blind()

        def look() -> Seen:
            output = None if marks is None else marks()
            probe.pids = frozenset(pids().values())
            python = _python_marks(sorted(probe.pids)) if self._reports_only else None
            return Seen(output, steps_of_workers(folder, ranks), workers.folder.file_mark(), probe.look(), python)

        return look

    def _warn_blind(self) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "[%s] this agent cannot see the workers' output, so --hang-timeout detects a hang only after the "
                "workers report progress (notices.progress or --progress-file)",
                self._workers.group.spec.role,
            )

    def _run(self) -> None:
        failed = False
        while not self._ending.wait(self._every):
            try:
                if (signs := self._signs) is not None:
                    signs.look(self._clock)
                    self.on_look()
            except Exception:
                if not failed:
                    log.exception(
                        "the workers' signs of life cannot be read; this is a bug in Rallypoint (please report it)"
                    )
                failed = True


def _python_marks(pids: Collection[int]) -> tuple[object, ...]:
    """A value per process that changes with its main thread's Python calls, or with all threads' if the main thread is
    waiting for others; for an unreadable process, with its processor time."""
    from rallypoint.base.python_memory import Unreadable, read_python

    marks: list[object] = []
    for pid in pids:
        try:
            main, *others = read_python(pid)
        except Unreadable:
            marks.append(sum(ticks_of(pid)) // _NOTICED)
            continue
        waits = bool(main.frames) and main.frames[0].file.endswith(_WAITING)
        marks.append((main.mark, *(thread.mark for thread in others if waits)))
    return tuple(marks)


_WAITING = ("/threading.py", "/queue.py", "/concurrent/futures/_base.py")
"""Places where a main thread waits for other threads to do the work."""
_NOTICED = 100
"""Ticks of processor time (a second) that count as activity in an unreadable program."""
