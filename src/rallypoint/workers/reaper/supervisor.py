"""The reaper and its supervisor: the program that the agent starts, and how the two watch each other.

agent -> supervisor -> reaper -> workers (each in a session of its own). The agent starts the supervisor, which forks
the reaper and only waits for it to end. Both are subreapers in one session of their own: whatever a worker
spawns stays below the reaper, however it leaves (a session of its own, two forks, an empty environment), and what a
reaper that is killed leaves falls to the supervisor.

    program           what the reaper does for the agent; the processes below a process: finding, killing, reaping them
    protocol          the messages between agent and reaper
    process_setup     set-up of reaper and supervisor: orphans, signals, descriptors

Laws:

1. When the reaper is gone, all that it left is killed, then the supervisor ends as the reaper did. When the supervisor
   is gone, the agent closes the connection. So there is no single process whose SIGKILL leaves anything behind.
2. Reaper and supervisor wake only for a reason: a request, the end of a child, the agent's end; while they kill, also
   by a timer.
3. Nothing is imported but built-in modules, the files of this folder and `base.process_table`. The packages above are
   empty here (see `client`): loading them would take longer than all of these together. Modules that only the reaper
   needs are imported before the fork too: after it, each page that the import touches would first have to be copied.
"""

from __future__ import annotations

import posix
import select

from rallypoint.workers.reaper import process_setup
from rallypoint.workers.reaper.process_setup import SIGKILL
from rallypoint.workers.reaper.program import LAST_TIMEOUT, ProcessTree, run_reaper

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def main(arguments: list[str]) -> None:
    """Run the supervisor, and by a fork the reaper, of the process whose connection and pidfd have these numbers."""
    link, agent = map(int, arguments[:-1])
    _exit_if_denied(101, posix.setsid)
    process_setup.close_inherited({link, agent})
    _exit_if_denied(102, process_setup.become_subreaper)
    reaper = posix.fork()
    if reaper:
        posix.close(link)
        posix.close(agent)
        _supervise(reaper)
    process_setup.become_subreaper()  # that is not inherited
    run_reaper(link, agent)


def _exit_if_denied(code: int, call: Callable[[], None]) -> None:
    """Call what may be denied, and exit with a code if it is; the agent turns that into a text (`protocol.DENIED`)."""
    try:
        call()
    except OSError:
        posix._exit(code)


def _supervise(reaper: int) -> None:
    """Supervise the reaper: wait until it ends, kill everything it has left, and end with the same status."""
    tree = ProcessTree(process_setup.sigchld_fd())
    tree.started.add(reaper)
    poller = select.poll()
    poller.register(tree.wake, select.POLLIN)
    tree.reap()
    while reaper not in tree.exits:
        poller.poll()
        tree.reap()
    code = tree.exits[reaper]
    tree.end(LAST_TIMEOUT if code else 0.0)  # a reaper that ended normally has waited itself
    if code == -SIGKILL:
        posix.kill(posix.getpid(), SIGKILL)
    posix._exit(code if code >= 0 else 128 - code)
