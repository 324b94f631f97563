"""The folder that this node shares with its workers (`rallypoint.notices`): notices for them, their acknowledgements,
and the progress that they report. Its one owner is `WorkerFolder`.

Workers call `notices.progress(step)`, which stores the step in the folder. Alternatively, `--progress-file` names a
file. It can contain an integer, like Megatron's `latest_checkpointed_iteration.txt`; for other files only the
modification time counts. If set, only the file shows what survives a failure; the workers' steps are shown beside it.

Laws:

1. Each start of workers uses a new, unguessable folder name. The agent creates the folder to post something; a worker
   creates it to report progress, or if it can continue in its process when a round ends. Other jobs touch no disk. Both
   sides use an existing folder only if it is private (`base/private_files.py`), because others might learn its name
   from the workers' environment.
2. When the workers are gone, so is the folder. It stays while some of them continue in their processes; newly started
   workers then use it too, after the feature that keeps workers removes the files of those that ended.

Laws of notices:

3. `WorkersReady` and the timer `NOTICE` come once per notice that waits.
4. Each notice has a number, which its acknowledgements carry. Acknowledging a withdrawn notice has no effect;
   acknowledging a replaced notice counts for its successor too.

Laws of progress:

5. Unused progress costs a look at a missing folder, at intervals that double up to a minute.
6. The loop reads only local files. A thread reads the progress file, which might be on a network disk that hangs.
7. A value from before the workers' start is not their progress.
8. A round's progress is reported once, when it exceeds the job's earlier progress, and once more at the end.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Collection

from rallypoint.agent.sources import Source
from rallypoint.agent.steps import Timer, TimerFired, WorkersReady
from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.errors import UserError
from rallypoint.base.light_typing import TYPE_CHECKING, NamedTuple
from rallypoint.base.log import get_logger
from rallypoint.base.private_files import is_private, make_private, open_regular, replace_file
from rallypoint.base.side_thread import start_thread
from rallypoint.control.membership.state import RecordProgress
from rallypoint.control.protocol.messages import Request
from rallypoint.notices import ACK_PREFIX, LOOKS_PREFIX, NOTICE_FILE, PROGRESS_PREFIX, PROGRESS_SIZE
from rallypoint.workers.logs.specs import temporary_folder

if TYPE_CHECKING:
    from rallypoint.base.inotify import Inotify

log = get_logger(__name__)

_POLL = 1.0
"""Seconds between polls for acknowledgements if inotify is not available."""
_FIRST_LOOK, _MAX_IDLE, _EVERY = 1.0, 60.0, 5.0
"""Seconds until the first look at a round's workers; the longest time between looks if they report nothing; the time
between looks if they do."""
_FILE_EVERY = 1.0
"""Seconds between looks at the progress file."""
_MAX_TEXT = 64
"""Maximum length in bytes of the integer in the file."""
_MAX_STEP = 2**63 - 1
_MAX_TOLD = 1024
"""Maximum number of workers per node whose steps are reported individually."""

_LAYOUT = struct.Struct("=qq")


class Reached(NamedTuple):
    """The progress of workers: the step, -1 if unknown, and the time when they reached it, on the monotonic clock.

    `first` is the first step reported in the round, -1 if unknown, and `first_at` its time; `mark` is a value that
    changes with the file, whatever its contents.
    """

    step: int
    at: float
    first: int = -1
    mark: tuple[int, int, int] = (0, 0, 0)
    first_at: float = 0.0


class WorkerFolder(Source):
    """The folder of one node's workers, round by round. Nothing here waits.

    Args:
        awaited: returns the local ranks of the workers that, as far as the loop knows, are still running. Only these
            need to acknowledge. If one ended unnoticed, perhaps because its work is done, the loop notices that first.
        send: sends the workers' progress to the coordinator.
        path: the progress file; empty for none.
        clock: the workers' own CLOCK_MONOTONIC, except in tests.
    """

    def __init__(
        self,
        awaited: Callable[[], Collection[int]],
        send: Callable[[Request], None],
        path: str = "",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._awaited = awaited
        self._send = send
        self._path = path
        self._clock = clock
        self._folder = ""
        self._created = False
        self.on_folder: Callable[[], None] = lambda: None
        """Called at intervals after workers created the folder."""
        self.on_progress: Callable[[Reached, bool], None] = lambda reached, from_file: None
        """Called with new progress, and whether it was read from the file."""
        # Notice
        self._inotify: Inotify | None = None
        self._reason = ""
        self._expires_at = math.inf
        self._poll_at = math.inf
        self._awaits_acknowledgements = False
        self._seen = True
        self._number = 0
        self._first = 1
        """The number of the first notice whose acknowledgements count."""
        # Progress
        self._file: _FileReader | None = None
        self._ranks = 0
        self._round = -1
        self._since = -math.inf
        self._best = -1
        """The highest step that the job reached before this round."""
        self.step_before = -1
        """The last step that this node's workers reported in an earlier round, -1 for none."""
        self._look_at = math.inf
        self._idle = _FIRST_LOOK
        self._used = False
        """Whether workers of this node have ever reported progress."""
        self._of_workers: Reached | None = None
        self._told: tuple[Reached | None, ...] = ()
        """The workers' reports at the last look, by local rank."""
        self._of_file: Reached | None = None
        self._base: Reached | None = None
        """The file's state when the workers were started; None if it has not been read yet."""
        self._reported = False
        self._reported_step = -1

    # Notices

    def reset(self, *, keep: bool = False) -> str:
        """Prepare for new workers.

        Args:
            keep: whether some workers that know the folder continue.

        Returns:
            The folder for their notices; empty if no space is left for one.
        """
        self.clear(keep=keep)
        if keep:
            return self._folder
        try:
            self._folder = os.path.join(temporary_folder(), f"rallypoint-notices-{os.urandom(16).hex()}")
        except UserError as error:
            log.warning("workers will not receive any notices: %s", error)
            self._folder = ""
        return self._folder

    def post(self, reason: str, node: str, round_: int, seconds: float, *, waits: bool) -> None:
        """Post a notice. It replaces any other, and earlier acknowledgements count for it too.

        Args:
            reason: `SCALE` or `PREEMPTION`.
            node: the node that will be removed; empty for this one.
            round_: the round that will end.
            seconds: the time that the workers have. Among notices for the same reason, the earliest deadline counts.
            waits: whether `step` reports acknowledgements and the deadline.
        """
        over_at = self._clock.monotonic() + seconds
        if waits and reason == self._reason:
            over_at = min(over_at, self._expires_at)
        self._seen = True
        self._number += 1
        try:
            self._write({"reason": reason, "node": node, "round": round_, "deadline": over_at, "number": self._number})
            if waits and self._inotify is None:
                self._inotify = self._watch()
        except OSError as error:
            log.warning(
                "the workers cannot be notified (reason: %s), so the agent will not wait for them: %s", reason, error
            )
            self._seen = False
        self._awaits_acknowledgements = waits
        self._reason = reason if waits else ""
        self._expires_at = over_at if waits else math.inf
        # Poll at once: acknowledgements of an earlier notice count for this one. If all exist, nothing in the folder
        # changes, and no event arrives.
        self._poll_at = self._clock.monotonic() if waits else math.inf

    def withdraw(self) -> None:
        """Remove the notice and its acknowledgements."""
        self._awaits_acknowledgements, self._reason = False, ""
        self._first = self._number + 1
        self._expires_at = self._poll_at = math.inf
        if self._created:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._folder, NOTICE_FILE))

    def clear(self, *, keep: bool = False) -> None:
        """Remove everything once the workers are gone; only the notice if some continue (`keep`). Idempotent."""
        # Read the progress once more before removing the files:
        #   1. a failure on another node ends the round, and `end_round` reports step 41 of our workers;
        #   2. they finish step 42 before SIGTERM reaches them;
        #   3. without this, `step_before`, shown in the next round's reports, would be one too small.
        if self._round >= 0:
            self._of_workers = self._newest() or self._of_workers
        self.withdraw()
        if keep:
            return
        if self._inotify is not None:
            self._inotify.close()
            self._inotify = None
        if self._created or (self._folder and is_private(self._folder)):  # or a worker created it
            from shutil import rmtree

            rmtree(self._folder, ignore_errors=True)
            self._created = False

    def is_looked_at(self) -> bool:
        """Whether a worker looks for notices, and so created its `looks` file (`notices.pending`)."""
        try:
            names = os.listdir(self._folder) if self._folder and is_private(self._folder) else []
        except OSError:
            return False
        return any(name.startswith(LOOKS_PREFIX) for name in names)

    def any_acknowledged(self) -> bool:
        """Whether a worker acknowledged a notice that counts."""
        return self._created and bool(self._acknowledged())

    def _write(self, notice: dict[str, object]) -> None:
        import json

        if not self._folder:
            raise OSError("the notice folder does not exist")
        if not self._created:
            make_private(self._folder)  # unless a worker that reports progress created it
            self._created = True
        replace_file(os.path.join(self._folder, NOTICE_FILE), json.dumps(notice).encode())

    def _watch(self) -> Inotify | None:
        from rallypoint.base.inotify import CREATED, Inotify

        news = None
        try:
            news = Inotify()
            news.watch(self._folder, CREATED)
        except OSError as error:
            log.warning(
                "the notice folder cannot be watched, so it is polled for acknowledgements every %s s: %s", _POLL, error
            )
            if news is not None:
                news.close()
            return None
        return news

    def _acknowledged(self) -> set[int]:
        """Local ranks of the workers that acknowledged the notice."""
        try:
            names = os.listdir(self._folder) if self._created else []
        except OSError:
            return set()
        found = (name.removeprefix(ACK_PREFIX).partition(".") for name in names if name.startswith(ACK_PREFIX))
        answers = ((rank, number) for rank, _, number in found if rank.isdecimal() and number.isdecimal())
        return {int(rank) for rank, number in answers if self._first <= int(number) <= self._number}

    # Progress

    def begin_round(self, round_: int, ranks: int, best: int, since: float = -math.inf) -> None:
        """Start to track a round's workers.

        Args:
            round_: its number.
            ranks: the number of workers on this node.
            best: the highest step that the job reached before, -1 for none.
            since: reports before this time, on the clock, belong to an earlier round.
        """
        self._round, self._ranks, self._best = round_, ranks, best
        self._since = since
        if self._of_workers is not None:
            self.step_before = self._of_workers.step
        self._of_workers = self._of_file = None
        self._told = ()
        self._reported, self._reported_step = False, best
        self._idle = _FIRST_LOOK
        self._look_at = self._clock.monotonic() + _FIRST_LOOK
        self._base = None
        if self._path and self._file is None:
            self._file = _FileReader(self._path)
        if self._file is not None and self._file.reading is not None:
            self._take_base(self._file.reading)

    def end_round(self) -> None:
        """Report the workers' final progress: the round has ended or will soon. Idempotent."""
        self.look()
        self._look_at = math.inf
        latest = self._of_workers if self._file is None else self._of_file
        if latest is not None and latest.step > self._reported_step:
            self._reported_step = latest.step
            self._send(RecordProgress(self._round, latest.step))

    def latest(self) -> Reached | None:
        """The workers' progress: their own reports, else the file."""
        return self._of_workers or self._of_file or self._base

    def steps(self) -> tuple[int, ...]:
        """The last step of each of the round's workers, by local rank, -1 for none; empty if no worker reported one.

        Comes from the last `look`, as do `latest` and `began`, so the three agree.
        """
        told = self._told if len(self._told) <= _MAX_TOLD else ()
        return tuple(-1 if reached is None else reached.step for reached in told) if any(told) else ()

    def began(self) -> Reached | None:
        """The first progress report of this round; None if unknown."""
        known = (reached for reached in self._told if reached is not None and reached.first >= 0)
        return min(known, key=lambda reached: reached.first_at, default=None)

    def file_mark(self) -> tuple[int, int, int] | None:
        """A value that changes with the progress file; None without a file, or before it is first read. Any thread."""
        reading = None if self._file is None else self._file.reading
        return None if reading is None else reading.mark

    def made(self) -> bool:
        """Whether workers reported progress in this round, or the file changed since their start."""
        return self._of_workers is not None or self._of_file is not None

    def close(self) -> None:
        """Stop reading at the end of the run."""
        self._look_at = math.inf
        if self._file is not None:
            self._file.close()

    def look(self) -> None:
        """Read the current progress."""
        if self._round < 0:
            return
        found = self._newest()
        if found is not None and found != self._of_workers:
            self._take_in(found)
        if self._file is not None:
            self._take_in_file(self._file.reading)

    def _newest(self) -> Reached | None:
        """The highest step reported by a worker of the round, and when the first worker reached it."""
        self._told = steps_of_workers(self._folder, self._ranks, self._since)
        known = filter(None, self._told)
        return min(known, key=lambda reached: (-reached.step, reached.at), default=None)

    def _take_in(self, found: Reached) -> None:
        self._used = True
        self._of_workers = found._replace(at=min(found.at, self._clock.monotonic()))
        self.on_progress(self._of_workers, False)
        if self._file is None:
            self._tell_once(found.step)

    def _take_in_file(self, found: Reached | None) -> None:
        if found is None or found in (self._base, self._of_file):
            return
        if self._base is None:
            self._take_base(found)
            return
        self._of_file = found
        self.on_progress(found, True)
        self._tell_once(found.step)

    def _take_base(self, found: Reached) -> None:
        """Remember the earlier value: it shows that this node reports progress, and how far the job was."""
        self._base = found
        self._best = self._reported_step = max(self._best, found.step)
        self._send(RecordProgress(self._round, found.step, made=False))

    def _tell_once(self, step: int) -> None:
        if not self._reported and (step < 0 or step > self._best):
            self._reported, self._reported_step = True, max(step, self._best)
            self._send(RecordProgress(self._round, step))

    # Interface to the loop

    def fds(self) -> list[int]:
        return [self._inotify.fileno()] if self._awaits_acknowledgements and self._inotify is not None else []

    def wake_at(self) -> float:
        return min(self._expires_at, self._poll_at, self._look_at)

    def step(self) -> list[WorkersReady | TimerFired]:
        now = self._clock.monotonic()
        if now >= self._look_at:
            self.look()
            if self._folder and os.path.isdir(self._folder):
                self.on_folder()
            used = self._used or self._file is not None
            self._look_at = now + (min(self._idle, _EVERY) if used else self._idle)
            self._idle = min(2 * self._idle, _MAX_IDLE)
        found: list[WorkersReady | TimerFired] = []
        over = now >= self._expires_at
        if self._awaits_acknowledgements:
            if self._inotify is not None:
                self._inotify.changed()
            self._poll_at = math.inf if self._inotify is not None else now + _POLL
            acknowledged = self._seen and not set(self._awaited()) - self._acknowledged()
            if over or not self._seen or acknowledged:
                self._awaits_acknowledgements = False
                self._poll_at = math.inf
                found.append(WorkersReady(is_late=over and not acknowledged))
        if over:
            self._expires_at = math.inf
            found.append(TimerFired(Timer.NOTICE))
        return found


def steps_of_workers(folder: str, ranks: int, since: float = -math.inf) -> tuple[Reached | None, ...]:
    """Progress that each worker reported since this time, by local rank; empty if the folder cannot be used."""
    if not folder or not is_private(folder):
        return ()
    return tuple(_read_worker(os.path.join(folder, f"{PROGRESS_PREFIX}{rank}"), since) for rank in range(ranks))


def _read_worker(path: str, since: float) -> Reached | None:
    try:
        with open(open_regular(path), "rb", buffering=0) as file:
            text = file.read(PROGRESS_SIZE)
            step, at = _LAYOUT.unpack_from(text)
            first, first_at = _LAYOUT.unpack_from(text, _LAYOUT.size) if len(text) == PROGRESS_SIZE else (-1, 0)
    except (OSError, struct.error):
        return None
    if step < 0 or at / 1e9 < since:
        return None
    return Reached(step, at / 1e9, -1 if first_at / 1e9 < since else first, first_at=first_at / 1e9)


# Progress file


class _FileReader:
    """The thread that reads the file. Only this thread writes `reading`, and it always replaces the whole value."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.reading: Reached | None = None
        """The last result, None before the first look; a mark of zeros if the file did not exist."""
        self._ending = threading.Event()
        if start_thread(self._run, "rallypoint-progress") is None:
            log.warning("the progress file will not be read: this machine does not allow any more threads")

    def close(self) -> None:
        self._ending.set()  # do not wait for a disk that might hang

    def _run(self) -> None:
        while not self._ending.is_set():
            self._look()
            self._ending.wait(_FILE_EVERY)

    def _look(self) -> None:
        last = self.reading
        try:
            seen = os.stat(self._path)
            mark = (seen.st_ino, seen.st_mtime_ns, seen.st_size)
            if last is None or last.mark != mark:
                age = max(0.0, time.time() - seen.st_mtime)
                if last is not None:  # another host may set the file's time: never go back before the previous look
                    age = min(age, 2 * _FILE_EVERY)
                self.reading = Reached(_integer(self._path), time.monotonic() - age, mark=mark)
        except OSError:
            if last is None:
                self.reading = Reached(-1, time.monotonic())


def _integer(path: str) -> int:
    """The integer that is the whole contents of a file, -1 for any other contents."""
    with open(path, "rb") as file:
        text = file.read(_MAX_TEXT + 1)
    with contextlib.suppress(ValueError):
        if len(text) <= _MAX_TEXT and 0 <= (step := int(text)) <= _MAX_STEP:
            return step
    return -1
