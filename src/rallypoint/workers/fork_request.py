"""The agent's side of a worker that is forked from a zygote or a fork server; see `reaper.orphan`."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from rallypoint.base.light_typing import Any
from rallypoint.workers.reaper.client import ReaperClient, StartedWorker
from rallypoint.workers.reaper.protocol import Connection


class ForkFailed(OSError):
    """No copy could be made; `strerror` says why, and the process still answers."""


def request_fork(
    link: Connection, reaper: ReaperClient, message: tuple[Any, ...], descriptors: Sequence[int] = ()
) -> StartedWorker:
    """Have a process make a worker of itself, and the reaper adopt it.

    Args:
        link: the connection to the process; any exception except ForkFailed leaves it unusable.
        reaper: below which the process is.
        message: the description of the worker.
        descriptors: what it gets.

    Raises:
        ForkFailed: see the class.
        OSError, EOFError: the process does not answer.
        ReaperLost: the reaper has ended.
    """
    try:
        waiting, go = os.pipe()
    except OSError as error:
        raise ForkFailed(error.errno, f"no copy could be requested: {error.strerror}") from None
    try:
        link.send(message, [waiting, *descriptors])
        (what, value), received = link.read()
        if what == "failed":
            raise ForkFailed(value, f"no copy could be made: {os.strerror(value)}")
        if not received:  # the kernel drops those for which we have no room
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        started = StartedWorker(value, received[0])
        try:
            if not reaper.adopt(started.pid):
                raise ForkFailed(0, "the copy ended at once")
            os.write(go, b"g")
        except BaseException:
            os.close(started.pidfd)
            raise
        return started
    finally:
        os.close(waiting)
        os.close(go)
