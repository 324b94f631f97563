"""Notifies a worker before it is stopped: the job is about to change, so save and acknowledge::

    from rallypoint import notices

    for step, batch in enumerate(batches):
        train(batch)
        wanted = notices.pending() is not None      # cheap: one stat of one file
        if agree_among_all_ranks(wanted):           # for instance all_reduce(MAX) of the flag
            save(step)
            notices.acknowledge()

Workers on different nodes see a notice at different steps. If saving is collective, no rank may save alone, so all
ranks must agree on the step: reduce the flag over all of them, and save at the step where any rank has seen the notice.

Acknowledging is optional. Without it, the worker is stopped at the deadline, with the usual signal and grace period.
A worker may continue after it acknowledges; that work is repeated from the checkpoint.

Any language can do the same. The variable `RALLYPOINT_NOTICES` names a folder. A notice is the file `notice.json` in it
(written atomically), an object with `reason`, `node`, `round`, `deadline` (seconds on CLOCK_MONOTONIC, which all
processes on a host share) and `number`, which differs for each notice. To acknowledge, create an empty file
`ack.<LOCAL_RANK>.<number>` in the folder. The number prevents a late file from answering the next notice. The folder is
created by the first notice, or by a worker (accessible only to its user). A worker that looks for notices shows this
with an empty file `looks.<LOCAL_RANK>`.

Put a save that must not be interrupted into `saving`. A stop waits for it, within the worker's grace period::

    with notices.saving():
        torch.save(state, path)

In other languages, keep a `memfd_create(2)` named "rallypoint-saving" open while you save.

Nothing here raises, and without Rallypoint there is never a notice. The module imports almost nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rallypoint.base.light_typing import NamedTuple
from rallypoint.base.private_files import is_private, make_private, open_regular

VARIABLE = "RALLYPOINT_NOTICES"
"""Names the folder."""
NOTICE_FILE = "notice.json"
ACK_PREFIX = "ack."
LOOKS_PREFIX = "looks."
"""The prefix of the file that shows that a worker looks for notices."""
PROGRESS_PREFIX = "progress."
FIFO_PREFIX, LEFT_PREFIX, ROUND_PREFIX, PREPARED_PREFIX = "inprocess.", "left.", "round.", "prepared."
"""Prefixes of files with which a worker continues in the next round (`rallypoint.inprocess`)."""
STANDBY_VARIABLE = "RALLYPOINT_STANDBY"
"""A standby worker's number instead of a local rank, above all local ranks of its node."""
PROGRESS_SIZE = 32
"""Size of a worker's progress file in bytes; 16 if the writer does not say where it started."""

SAVING = "rallypoint-saving"
"""The name of the memory file that a worker keeps open while it saves."""

SCALE, PREEMPTION = "scale", "preemption"
"""The reasons: nodes will be added; one node or all nodes will be taken away."""


class Notice(NamedTuple):
    """The workers will soon be stopped.

    `reason` is "scale" (the workers restart with more nodes) or "preemption" (`node` will be taken away, or was the
    first to learn that the whole job will be; empty for this node). `node` is a readable name: host and group rank, as
    in "n3 (rank 2)". `round` is the round that will end. `deadline` is in seconds on CLOCK_MONOTONIC. `number`
    identifies the notice for `acknowledge`.
    """

    reason: str
    node: str
    round: int
    deadline: float
    number: int

    def remaining(self) -> float:
        """Seconds until the workers are stopped, never negative."""
        return max(0.0, self.deadline - time.monotonic())


_NoticeRead = tuple[tuple[int, int], Notice | None]
_last_read: _NoticeRead = ((0, 0), None)
"""The inode and modification time of the notice's file, and the last notice read."""
_last_returned: Notice | None = None
"""The last result of `pending`."""


def pending() -> Notice | None:
    """Return the current notice for this worker, if any. Cheap enough for every step."""
    global _last_returned, _looks_in
    folder = os.environ.get(VARIABLE)
    if folder != _looks_in:
        _looks_in = folder
        _leave_mark(folder)
    _last_returned = _poll()
    return _last_returned


_looks_in: str | None = None
"""The folder in which this worker has created its `looks` file; None until the first call."""


def _leave_mark(folder: str | None) -> None:
    rank = os.environ.get("LOCAL_RANK")
    if folder and rank:
        with suppress(OSError, ValueError):
            make_private(folder)
            _touch(os.path.join(folder, LOOKS_PREFIX + rank))


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


def acknowledge() -> None:
    """Report that this worker has saved what it wants to keep. Idempotent; does nothing without a notice.

    Acknowledges the notice that `pending` last returned, since it was the reason to save; otherwise the current one.
    """
    folder, rank, out = os.environ.get(VARIABLE), os.environ.get("LOCAL_RANK"), _poll()
    if not folder or not rank or out is None:
        return
    with suppress(OSError, ValueError):
        _touch(os.path.join(folder, f"{ACK_PREFIX}{rank}.{(_last_returned or out).number}"))


def progress(step: int) -> None:
    """Report this worker's progress: the last step (iteration, batch, sample) that it finished, counted from 0.

    Cheap enough for every step: it writes to shared memory and opens a file only on the first call.
    """
    global _progress_place, _progress
    folder = os.environ.get(VARIABLE)
    if folder != _progress_place:
        _progress_place, _progress = folder, _map_progress(folder)
    try:
        if _progress is not None and 0 <= step <= _MAX_STEP:
            _progress[1] = now = time.monotonic_ns()
            _progress[0] = int(step)
            if _progress[2] < 0:
                _progress[3] = now
                _progress[2] = int(step)
    except (TypeError, ValueError):  # not a number
        return


_MAX_STEP = 2**63 - 1
_progress_place: str | None = None
"""The folder that contains the file of `_progress`; None until the first call."""
_progress: memoryview[int] | None = None


def _map_progress(folder: str | None) -> memoryview[int] | None:
    rank = os.environ.get("LOCAL_RANK")
    if not folder or not rank:
        return None
    import mmap

    try:
        make_private(folder)
        path = os.path.join(folder, PROGRESS_PREFIX + rank)
        # Open it for appending, like a log, so that a stop does not mistake it for a checkpoint and wait for it.
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # Allocate disk space first: on a full disk, writing to the mapping would raise a signal. No step yet: -1.
            if os.fstat(file).st_size < PROGRESS_SIZE:
                none = (-1).to_bytes(8, "little", signed=True) + bytes(8)
                os.write(file, none + none)
            return memoryview(mmap.mmap(file, PROGRESS_SIZE)).cast("q")
        finally:
            os.close(file)
    except (OSError, ValueError):
        return None


@contextmanager
def saving() -> Iterator[None]:
    """Defer a stop of this worker until the block ends: SIGTERM waits, and so does the agent.

    Both wait at most for `--shutdown-timeout` (or `failure_grace`, if longer); then SIGKILL follows. On the main thread
    of a program without its own SIGTERM handler, the block is never interrupted. Elsewhere, the agent checks for the
    mark just before it sends the signal. If the worker outlives the round (`rallypoint.inprocess`), the round's end
    waits too.
    """
    with uninterrupted():
        mark = -1
        with suppress(KeyError, OSError):  # this platform does not support it, or no descriptor is free
            mark = vars(os)["memfd_create"](SAVING)
        try:
            with _sigterm_deferred():
                yield
        finally:
            if mark >= 0:
                os.close(mark)


open_blocks = 0
"""How many nested `uninterrupted` blocks the main thread is in."""
interrupt: Callable[[], None] | None = None
"""Called when the outermost block ends, to raise a deferred interruption; `rallypoint.inprocess` sets it."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer the interruption at a round's end until the block ends. Users import this from `rallypoint.inprocess`."""
    import threading

    global open_blocks
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    open_blocks += 1
    try:
        yield
    finally:
        open_blocks -= 1
        if interrupt is not None and not open_blocks:
            interrupt()


@contextmanager
def _sigterm_deferred() -> Iterator[None]:
    """Deliver SIGTERM at the end of the block, if it would otherwise kill this process immediately."""
    import signal
    import threading

    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    came: list[int] = []

    def defer(number: int, _frame: object) -> None:
        came.append(number)

    signal.signal(signal.SIGTERM, defer)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is defer:  # otherwise the program set its own handler: keep it
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if came:
            os.kill(os.getpid(), signal.SIGTERM)


def _poll() -> Notice | None:
    global _last_read
    folder = os.environ.get(VARIABLE)
    if not folder:
        return None
    path = os.path.join(folder, NOTICE_FILE)
    try:
        seen = os.stat(path)
    except (OSError, ValueError):
        return None
    mark = (seen.st_ino, seen.st_mtime_ns)
    if _last_read[0] != mark:
        _last_read = (mark, _read(path) if is_private(folder) else None)
    return _last_read[1]


def _read(path: str) -> Notice | None:
    import json

    try:
        with open(open_regular(path), encoding="utf-8") as file:
            content = json.load(file)
        return Notice(
            str(content["reason"]),
            str(content["node"]),
            int(content["round"]),
            float(content["deadline"]),
            int(content["number"]),
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
