"""Forks processes that the reaper adopts: how the zygote and the fork server make workers.

The agent's request comes with the reading end of a pipe as its first descriptor; the answer is ("started", pid) with a
pidfd, or ("failed", errno). The agent's side is `workers.fork_request`.

Laws:

1. A process is forked twice, and the intermediate one ends at once: so a worker's parent is the reaper, which adopts
   orphans, and its exit code is found where those of other workers are.
2. A worker waits for the byte in the pipe, which the agent writes when the reaper knows the worker. So none can end
   before its end is waited for, and none is left if the agent was interrupted.
3. Built-in modules only: the zygote uses this.
"""

from __future__ import annotations

import posix
import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rallypoint.workers.reaper.protocol import Connection

_EIO = 5


def fork_orphan(link: Connection) -> int:
    """Make a worker, and answer the request; returns 0 here, and in the worker the pid of the parent about to end."""
    try:
        between = posix.fork()
    except OSError as error:
        send(link, "failed", error.errno or _EIO)
        return 0
    if between:
        try:  # noqa: SIM105 - contextlib may not have been imported
            posix.waitpid(between, 0)
        except OSError:  # reaped by a handler that the imports have set; the answer comes from that process in any case
            pass
        return 0
    try:
        between = posix.getpid()
        pid = posix.fork()
        if pid == 0:
            return between
        send(link, "started", pid, descriptors=(posix.pidfd_open(pid),))
    except OSError as error:
        send(link, "failed", error.errno or _EIO)
    posix._exit(0)


def send(link: Connection, *message: object, descriptors: tuple[int, ...] = ()) -> None:
    """Send the agent a message; does nothing if the agent is gone."""
    try:  # noqa: SIM105 - contextlib may not have been imported
        link.send(message, descriptors)
    except OSError:
        pass


def await_release(fd: int) -> None:
    """In the worker: wait for the byte in the pipe; ends the process if the agent is gone, or has given up."""
    if not posix.read(fd, 1):
        posix._exit(127)


def await_exit(parent: int) -> None:
    """In the worker: wait until the parent has ended and the reaper has become the parent."""
    try:
        fd = posix.pidfd_open(parent)
    except OSError:
        return
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    poller.poll()
    posix.close(fd)
