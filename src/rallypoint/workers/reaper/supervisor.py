"""The guardian and its keeper: the program that the agent starts, and what the two are for each other.

agent -> keeper -> guardian -> workers (each in a session of its own). The keeper is what the agent has started; it
forks the guardian and does nothing but wait for its end. Both are subreapers in one session of their own: whatever a
worker spawns stays below the guardian, however it leaves (a session of its own, two forks, an empty environment), and
what a guardian that is killed leaves falls to the keeper.

    program   what the guardian does for the agent
    protocol  what the two say to each other
    family    all that is below a process: finding, killing, reaping it
    footing   how guardian and keeper stand in the system: orphans, signals, descriptors, memory

Laws:

1. When the guardian is gone, all that it left is killed, then the keeper ends as the guardian did. When the keeper is
   gone, the agent lets go. So there is no one process whose SIGKILL leaves anything.
2. Guardian and keeper wake for a cause only: a request, the end of a child, the agent's end; while they kill, also by a
   timer; and the keeper once by the clock, when the start is over.
3. Nothing is imported but built-in modules and the files of this folder. The packages above it are empty here (see
   `client`): to load them would take longer than all of these together. What only the guardian needs is imported above
   the fork too: below it, each page that this touches would first have to be copied.
"""

from __future__ import annotations

import posix
import select

from rallypoint.workers.reaper import process_setup
from rallypoint.workers.reaper.process_setup import SIGKILL
from rallypoint.workers.reaper.process_tree import LAST_TIMEOUT, ProcessTree
from rallypoint.workers.reaper.program import run_reaper

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_STARTUP_TIME = 0.5
"""Seconds that the start of a job takes, so that the keeper's own work then comes after it."""


def main(arguments: list[str]) -> None:
    """Be the keeper, and by a fork the guardian, of the process whose connection and pidfd have these numbers."""
    link, agent = map(int, arguments[:2])
    _exit_if_denied(101, posix.setsid)
    process_setup.close_inherited({link, agent})
    _exit_if_denied(102, process_setup.become_subreaper)
    guardian = posix.fork()
    if guardian:
        posix.close(link)
        posix.close(agent)
        _supervise(guardian)
    process_setup.become_subreaper()  # that is not inherited
    run_reaper(link, agent)


def _exit_if_denied(code: int, call: Callable[[], None]) -> None:
    """Do what may be denied; the agent finds words for the code (`protocol.DENIED`)."""
    try:
        call()
    except OSError:
        posix._exit(code)


def _supervise(guardian: int) -> None:
    """Be the keeper: wait for the guardian's end, leave nothing of what it left, and end as it did."""
    family = ProcessTree(process_setup.sigchld_fd())
    family.started.add(guardian)
    poller = select.poll()
    poller.register(family.wake, select.POLLIN)
    # Nobody can ask the keeper to give its memory back, so it goes by the clock; and not at once, since that takes some
    # milliseconds of a processor, of which a job that starts has none to spare.
    wait: float | None = _STARTUP_TIME * 1000
    family.reap()
    while guardian not in family.exits:
        if poller.poll(wait):
            family.reap()
        else:
            process_setup.trim_memory()
            wait = None
    code = family.exits[guardian]
    family.end(LAST_TIMEOUT if code else 0.0)  # one that ended well has waited itself
    if code == -SIGKILL:
        posix.kill(posix.getpid(), SIGKILL)
    posix._exit(code if code >= 0 else 128 - code)
