"""Tracks the progress of the workers of one node, as reported by themselves, or by a file that they write.

Workers call `notices.progress(step)`, which leaves the step in their notice directory; or `--progress-file` names one
that has an integer (such as Megatron's `latest_checkpointed_iteration.txt`), or one of which only the time of its last
change counts. If a file is named, it alone shows what survives a failure; the steps that workers report are shown
beside it.

Laws:

1. If it is not used, it costs a look at a missing folder, at intervals that double up to a minute.
2. The loop reads what lies on this machine only. The file may be on a network disk that hangs: a thread reads it.
3. A value from before the workers were started is not their progress.
4. A round's progress is reported once, when it exceeds what the job had reached before; then once more at its end.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable

from rallypoint.agent.sources import Source
from rallypoint.base.clock import Clock
from rallypoint.base.light_typing import NamedTuple
from rallypoint.base.private_files import is_private, open_regular
from rallypoint.control.membership.state import RecordProgress
from rallypoint.control.protocol.messages import Request
from rallypoint.notices import PROGRESS_PREFIX, PROGRESS_SIZE

_FIRST_LOOK, _MAX_IDLE, _EVERY = 1.0, 60.0, 5.0
"""Seconds until the first look at the workers of a round, and between looks: at most if they report nothing; if they
do.
"""
_FILE_EVERY = 1.0
"""Seconds between two looks at the file."""
_MAX_TEXT = 64
"""Bytes of the file that may hold an integer."""
_MAX_STEP = 2**63 - 1
_MAX_TOLD = 1024
"""Workers of one node whose steps are reported individually."""

_LAYOUT = struct.Struct("=qq")


class Reached(NamedTuple):
    """The progress of workers: the step, -1 if unknown, and when it was reached, on the monotonic clock.

    `first` is the first step reported in the round, -1 if that is not known, `mark` a value that changes with the file,
    whatever its contents.
    """

    step: int
    at: float
    first: int = -1
    mark: tuple[int, int, int] = (0, 0, 0)


class ProgressTracker(Source):
    """The progress tracker of one agent, stepped by its loop. Nothing here waits.

    Args:
        clock: CLOCK_MONOTONIC, except in tests.
        path: the progress file; empty for none.
        send: takes requests to the coordinator.
        seen: called with each new value, and whether it comes from the file.
    """

    def __init__(
        self,
        clock: Clock,
        path: str,
        send: Callable[[Request], None],
        seen: Callable[[Reached, bool], None] | None = None,
    ) -> None:
        self._clock = clock
        self._send = send
        self._seen = seen
        self._file = _FileReader(path) if path else None
        self._folder = ""
        self._ranks = 0
        self._round = -1
        self.on_folder: Callable[[], None] = lambda: None
        """Called at each look that finds that workers have made the folder."""
        self._since = -math.inf
        self._best = -1
        """The highest step that the job had reached before this round."""
        self._look_at = math.inf
        self._idle = _FIRST_LOOK
        self._used = False
        """Whether workers of this node have ever reported progress."""
        self._of_workers: Reached | None = None
        self._of_file: Reached | None = None
        self._base: Reached | None = None
        """The state of the file when the workers were started; None if it has not been read yet."""
        self._reported = False
        self._reported_step = -1

    def begin_round(self, round_: int, folder: str, ranks: int, best: int, since: float = -math.inf) -> None:
        """The workers of a round are started.

        Args:
            round_: its number.
            folder: their notice directory.
            ranks: the number of workers on this node.
            best: the highest step that the job had reached before, -1 for none.
            since: reports of workers from before this time, on the clock, belong to an earlier round.
        """
        self._round, self._folder, self._ranks, self._best = round_, folder, ranks, best
        self._since = since
        self._of_workers = self._of_file = None
        self._reported, self._reported_step = False, best
        self._idle = _FIRST_LOOK
        self._look_at = self._clock.monotonic() + _FIRST_LOOK
        self._base = None
        if self._file is not None and self._file.reading is not None:
            self._take_base(self._file.reading)

    def end_round(self) -> None:
        """The round is over, or is about to be: report the progress of its workers. Idempotent."""
        self.look()
        self._look_at = math.inf
        latest = self._of_workers if self._file is None else self._of_file
        if latest is not None and latest.step > self._reported_step:
            self._reported_step = latest.step
            self._send(RecordProgress(self._round, latest.step))

    def latest(self) -> Reached | None:
        """The progress of the workers: as reported by themselves, else by the file."""
        return self._of_workers or self._of_file or self._base

    def steps(self) -> tuple[int, ...]:
        """The last step of each worker of the round, by local rank, -1 for none; empty if none has reported any."""
        told = steps_of_workers(self._folder, self._ranks if self._ranks <= _MAX_TOLD else 0, self._since)
        return tuple(-1 if each is None else each.step for each in told) if any(told) else ()

    def file_mark(self) -> tuple[int, int, int] | None:
        """A value that changes with the progress file; None if there is none or it was not read yet. Any thread."""
        reading = None if self._file is None else self._file.reading
        return None if reading is None else reading.mark

    def made(self) -> bool:
        """Whether the workers of this round have reported progress, or the file has changed since they were started."""
        return self._of_workers is not None or self._of_file is not None

    def close(self) -> None:
        """The run is over."""
        self._look_at = math.inf
        if self._file is not None:
            self._file.close()

    # For the loop

    def wake_at(self) -> float:
        return self._look_at

    def step(self) -> None:
        now = self._clock.monotonic()
        if now < self._look_at:
            return
        self.look()
        if self._used or self._file is not None:
            self._look_at = now + min(self._idle, _EVERY)
        else:
            self._look_at = now + self._idle
        self._idle = min(2 * self._idle, _MAX_IDLE)

    def look(self) -> None:
        """Read the present progress."""
        if self._round < 0:
            return
        self._take_in(_newest(steps_of_workers(self._folder, self._ranks, self._since)))
        if self._folder and os.path.isdir(self._folder):
            self.on_folder()
        if self._file is not None:
            self._take_in_file(self._file.reading)

    # Inside

    def _take_in(self, found: Reached | None) -> None:
        if found is None or found == self._of_workers:
            return
        self._used = True
        self._of_workers = found._replace(at=min(found.at, self._clock.monotonic()))
        if self._seen is not None:
            self._seen(self._of_workers, False)
        if self._file is None:
            self._tell_once(found.step)

    def _take_in_file(self, found: Reached | None) -> None:
        if found is None or found in (self._base, self._of_file):
            return
        if self._base is None:
            self._take_base(found)
            return
        self._of_file = found
        if self._seen is not None:
            self._seen(found, True)
        self._tell_once(found.step)

    def _take_base(self, found: Reached) -> None:
        """Take the value from before: it shows that this node reports progress, and how far the job had come."""
        self._base = found
        self._best = self._reported_step = max(self._best, found.step)
        self._send(RecordProgress(self._round, found.step, made=False))

    def _tell_once(self, step: int) -> None:
        if not self._reported and (step < 0 or step > self._best):
            self._reported, self._reported_step = True, max(step, self._best)
            self._send(RecordProgress(self._round, step))


def steps_of_workers(folder: str, ranks: int, since: float = -math.inf) -> tuple[Reached | None, ...]:
    """The progress that each worker of a node has reported since then, by local rank; empty if none has."""
    if not folder or not is_private(folder):
        return ()
    return tuple(_read_worker(os.path.join(folder, f"{PROGRESS_PREFIX}{rank}"), since) for rank in range(ranks))


def _newest(told: Iterable[Reached | None]) -> Reached | None:
    """The highest step of the workers of a node, and when the first of them reached it."""
    found: Reached | None = None
    for each in told:
        if each is not None and (found is None or (-each.step, each.at) < (-found.step, found.at)):
            found = each
    return found


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
    return Reached(step, at / 1e9, -1 if first_at / 1e9 < since else first)


# The file


class _FileReader:
    """The thread that looks at the file. It alone writes `reading`, which is replaced as a whole."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.reading: Reached | None = None
        """The last result, None before the first look; a mark of zeros if there was no file."""
        self._ending = threading.Event()
        threading.Thread(target=self._run, name="rallypoint-progress", daemon=True).start()

    def close(self) -> None:
        self._ending.set()  # do not wait for a disk that may hang

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
                if last is not None:  # the time of day may be another host's: not earlier than the previous look
                    age = min(age, 2 * _FILE_EVERY)
                self.reading = Reached(_integer(self._path), time.monotonic() - age, mark=mark)
        except OSError:
            if last is None:
                self.reading = Reached(-1, time.monotonic())


def _integer(path: str) -> int:
    """The integer that is the whole contents of a file, -1 if it has anything else."""
    with open(path, "rb") as file:
        text = file.read(_MAX_TEXT + 1)
    with contextlib.suppress(ValueError):
        if len(text) <= _MAX_TEXT and 0 <= (step := int(text)) <= _MAX_STEP:
            return step
    return -1
