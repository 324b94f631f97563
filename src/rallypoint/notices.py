"""What a worker can know of a stop before it comes: the job is about to change, so save and say when that is done.

    from rallypoint import notices

    for step, batch in enumerate(batches):
        train(batch)
        wanted = notices.pending() is not None      # cheap: one stat of one file
        if agree_among_all_ranks(wanted):           # for instance all_reduce(MAX) of the flag
            save(step)
            notices.acknowledge()

Workers of different nodes see a notice at different steps, and no rank may save alone where saving is collective. So
all ranks must agree on the step: reduce the flag over all of them, and save in the step in which anybody saw it.

Nothing has to be acknowledged: whoever does not is stopped at the deadline, with the usual signal and grace. After the
acknowledgement a worker may go on; what it does then is done again from the checkpoint.

Any language can do the same. The variable `RALLYPOINT_NOTICES` names a folder. A notice is the file `notice.json` in it
(it is there whole or not at all), an object with `reason`, `node`, `round`, `deadline` (seconds on CLOCK_MONOTONIC,
which is the same for all processes of a host) and `number`, another one for each notice. An acknowledgement is an empty
file `ack.<LOCAL_RANK>.<number>` beside it: so one that comes late answers no later notice. The folder is there only
while there is, or was, a notice.

A save that has to come to its end is put under `saving`: the stop of a worker waits for it, as long as its grace goes.

    with notices.saving():
        torch.save(state, path)

In another language, hold open a `memfd_create(2)` of the name "rallypoint-saving" for that time.

Nothing here raises, and outside of Rallypoint there is never a notice. Nothing of the rest of Rallypoint is imported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

VARIABLE = "RALLYPOINT_NOTICES"
"""The variable that names the folder."""
NOTICE_FILE = "notice.json"
ACK_PREFIX = "ack."

SAVING = "rallypoint-saving"
"""The name of the memory file that a worker holds open while it saves."""

SCALE, PREEMPTION = "scale", "preemption"
"""The reasons: nodes are to be taken in, or one will be taken away."""


class Notice(NamedTuple):
    """The workers will soon be stopped.

    `reason` is "scale" (to be started again with more nodes) or "preemption" (`node` will be taken away; empty where it
    is this one). `node` is a name for people: host and group rank, as in "n3 (rank 2)". `round` is the round that is to
    end. `deadline` is in seconds on CLOCK_MONOTONIC. `number` is what `acknowledge` answers to.
    """

    reason: str
    node: str
    round: int
    deadline: float
    number: int

    def remaining(self) -> float:
        """Seconds until nobody waits any longer, never negative."""
        return max(0.0, self.deadline - time.monotonic())


_NoticeRead = tuple[tuple[int, int], Notice | None]
_last_read: _NoticeRead = ((0, 0), None)
"""The last notice read, by number and time of its file."""
_last_returned: Notice | None = None
"""What `pending` gave last."""


def pending() -> Notice | None:
    """The notice that is out for this worker, if there is one. Cheap enough for every step."""
    global _last_returned
    _last_returned = _look()
    return _last_returned


def acknowledge() -> None:
    """Say that this worker has saved what it wants to keep. Idempotent; nothing happens while no notice is out.

    It answers the notice that `pending` gave last, since what was saved was saved for that one; if it gave none, the
    one that is out.
    """
    folder, rank, out = os.environ.get(VARIABLE), os.environ.get("LOCAL_RANK"), _look()
    if not folder or not rank or out is None:
        return
    path = os.path.join(folder, f"{ACK_PREFIX}{rank}.{(_last_returned or out).number}")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except (OSError, ValueError):
        return


@contextmanager
def saving() -> Iterator[None]:
    """What is done inside shall not be cut off by a stop: SIGTERM waits until it is over, and the agent for that.

    It waits as long as `--shutdown-timeout` (or `failure_grace`, if that is longer) goes, then comes SIGKILL. On the
    main thread, where the program has no handler of its own for SIGTERM, nothing can come in between; elsewhere the
    agent finds the mark when it looks, just before it sends the signal.
    """
    mark = -1
    with suppress(AttributeError, OSError):  # no such call here, or no descriptor is free
        mark = os.memfd_create(SAVING)
    try:
        with _sigterm_deferred():
            yield
    finally:
        if mark >= 0:
            os.close(mark)


@contextmanager
def _sigterm_deferred() -> Iterator[None]:
    """SIGTERM comes at the end, where it would end this process at once."""
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
        if signal.getsignal(signal.SIGTERM) is defer:  # else the program has made another meanwhile, which stays
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if came:
            os.kill(os.getpid(), signal.SIGTERM)


def _look() -> Notice | None:
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
        _last_read = (mark, _read(path))
    return _last_read[1]


def _read(path: str) -> Notice | None:
    import json

    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        return Notice(
            str(found["reason"]),
            str(found["node"]),
            int(found["round"]),
            float(found["deadline"]),
            int(found["number"]),
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
