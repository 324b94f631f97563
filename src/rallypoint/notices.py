"""Notifies a worker before it is stopped: the job is about to change, so save and acknowledge::

    from rallypoint import notices

    for step, batch in enumerate(batches):
        train(batch)
        wanted = notices.pending() is not None      # cheap: one stat of one file
        if agree_among_all_ranks(wanted):           # for instance all_reduce(MAX) of the flag
            save(step)
            notices.acknowledge()

Workers of different nodes see a notice at different steps, and no rank may save alone if saving is collective. So all
ranks must agree on the step: reduce the flag over all of them, and save in the step in which any of them saw it.

Nothing has to be acknowledged: a worker that does not is stopped at the deadline, with the usual signal and grace
period. After the acknowledgement a worker may continue; what it does then is repeated from the checkpoint.

Any language can do the same. The variable `RALLYPOINT_NOTICES` names a folder. A notice is the file `notice.json` in it
(written atomically), an object with `reason`, `node`, `round`, `deadline` (seconds on CLOCK_MONOTONIC, which is the
same for all processes of a host) and `number`, a different one for each notice. An acknowledgement is an empty file
`ack.<LOCAL_RANK>.<number>` beside it, so that a late one answers no later notice. The folder exists only while there
is, or was, a notice, or once a worker has made it (for its user alone): a worker that looks for notices says so by an
empty file `looks.<LOCAL_RANK>` in it.

A save that must not be interrupted goes into `saving`: the stop of a worker waits for it, within its grace period::

    with notices.saving():
        torch.save(state, path)

In another language, keep a `memfd_create(2)` of the name "rallypoint-saving" open meanwhile.

Nothing here raises, and outside of Rallypoint there is never a notice. Next to nothing of Rallypoint is imported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rallypoint.base.light_typing import NamedTuple
from rallypoint.base.private_files import is_private, make_private, open_regular

VARIABLE = "RALLYPOINT_NOTICES"
"""The variable that names the folder."""
NOTICE_FILE = "notice.json"
ACK_PREFIX = "ack."
LOOKS_PREFIX = "looks."
"""The prefix of the file by which a worker shows that it looks for notices."""
PROGRESS_PREFIX = "progress."
FIFO_PREFIX, LEFT_PREFIX, ROUND_PREFIX, PREPARED_PREFIX = "inprocess.", "left.", "round.", "prepared."
"""Prefixes of the files by which a worker continues in the next round (`rallypoint.inprocess`)."""
STANDBY_VARIABLE = "RALLYPOINT_STANDBY"
"""What a standby worker has in place of a local rank, above those of all workers of its node."""
PROGRESS_SIZE = 32
"""Bytes of a worker's progress file; a writer of 16 leaves out where it began."""

SAVING = "rallypoint-saving"
"""The name of the memory file that a worker has open while it saves."""

SCALE, PREEMPTION = "scale", "preemption"
"""The reasons: nodes will be added, or one node will be taken away, or all nodes will be."""


class Notice(NamedTuple):
    """The workers will soon be stopped.

    `reason` is "scale" (to be restarted with more nodes) or "preemption" (`node` will be taken away, or was the first
    to be told that the whole job will be; empty if it is this one). `node` is a name for people: host and group rank,
    as in "n3 (rank 2)". `round` is the round that will end. `deadline` is in seconds on CLOCK_MONOTONIC. `number`
    identifies the notice to `acknowledge`.
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
"""The last notice read, by number and time of its file."""
_last_returned: Notice | None = None
"""What `pending` returned last."""


def pending() -> Notice | None:
    """The current notice for this worker, if there is one. Cheap enough for every step."""
    global _last_returned, _looks_in
    folder = os.environ.get(VARIABLE)
    if folder != _looks_in:
        _looks_in = folder
        _leave_mark(folder)
    _last_returned = _poll()
    return _last_returned


_looks_in: str | None = None
"""The folder in which this worker has left its mark; None until the first call."""


def _leave_mark(folder: str | None) -> None:
    rank = os.environ.get("LOCAL_RANK")
    if folder and rank:
        with suppress(OSError, ValueError):
            make_private(folder)
            _touch(os.path.join(folder, LOOKS_PREFIX + rank))


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


def acknowledge() -> None:
    """Report that this worker has saved what it wants to keep. Idempotent; without a notice nothing happens.

    It answers the notice that `pending` returned last, since that was the reason to save; else the current one.
    """
    folder, rank, out = os.environ.get(VARIABLE), os.environ.get("LOCAL_RANK"), _poll()
    if not folder or not rank or out is None:
        return
    with suppress(OSError, ValueError):
        _touch(os.path.join(folder, f"{ACK_PREFIX}{rank}.{(_last_returned or out).number}"))


def progress(step: int) -> None:
    """Report the progress of this worker: the step (iteration, batch, sample) that it has finished, from 0 on.

    Cheap enough for every step: it writes to shared memory, and opens a file the first time only.
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
"""The folder that has the file of `_progress`; None until the first call."""
_progress: memoryview[int] | None = None


def _map_progress(folder: str | None) -> memoryview[int] | None:
    rank = os.environ.get("LOCAL_RANK")
    if not folder or not rank:
        return None
    import mmap

    try:
        make_private(folder)
        path = os.path.join(folder, PROGRESS_PREFIX + rank)
        # Opened to append, as logs are, it is not taken for a checkpoint whose writing a stop has to wait for.
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # Allocate disk space before writing to the memory: a full disk would raise a signal there. No step yet: -1.
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
    """Defer a stop of this worker until the block has ended: SIGTERM waits, and so does the agent.

    They wait for `--shutdown-timeout` (or `failure_grace`, if that is longer) at most; then SIGKILL follows. On the
    main thread, if the program has no handler of its own for SIGTERM, the block is never interrupted; elsewhere the
    agent finds the mark when it checks for it, just before it sends the signal. The end of a round waits too, in a
    worker that outlives it (`rallypoint.inprocess`).
    """
    with uninterrupted():
        mark = -1
        with suppress(KeyError, OSError):  # the call does not exist here, or no descriptor is free
            mark = vars(os)["memfd_create"](SAVING)
        try:
            with _sigterm_deferred():
                yield
        finally:
            if mark >= 0:
                os.close(mark)


open_blocks = 0
"""The number of nested `uninterrupted` blocks that the main thread is in."""
interrupt: Callable[[], None] | None = None
"""Called when the last of them ends: raises an interruption that arrived meanwhile (set by `rallypoint.inprocess`)."""


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer the interruption at a round's end until the block ends; exported to users by `rallypoint.inprocess`."""
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
    """Deliver SIGTERM at the end of the block, if it would otherwise end this process at once."""
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
        if signal.getsignal(signal.SIGTERM) is defer:  # otherwise the program has set another meanwhile, which stays
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
