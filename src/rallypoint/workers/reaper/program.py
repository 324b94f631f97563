"""What the guardian does for its agent: starts workers, tells of their ends, kills what they leave. See `supervisor`.

Laws:

1. When the agent is gone, by whatever, all that is below the guardian is killed, then what the agent had asked to be
   removed is removed, then the guardian ends. It ends alike, without the removing, when the agent lets go of it.
2. The agent never uses a pid: it gets a pidfd with each worker.
3. A worker starts with what the agent has at that moment: folder, umask, signal mask, ignored signals, descriptors.
4. The guardian keeps what signals it is sent, and can tell: as each worker it is below the agent in a session of its
   own, so whoever signals all processes of a job has sent them to the workers too (`workers/forwarding`).
"""

from __future__ import annotations

import posix
import select
from _socket import MSG_CMSG_CLOEXEC, socket

from rallypoint.workers.reaper import process_setup
from rallypoint.workers.reaper.process_setup import SIGCHLD, SIGKILL, SIGPIPE, SIGXFSZ
from rallypoint.workers.reaper.process_tree import LAST_TIMEOUT, SWEEP_INTERVAL, ProcessTree
from rallypoint.workers.reaper.protocol import (
    ADOPT,
    CLEANUP,
    GIVE_UP,
    HEARD,
    KILL,
    MAX_DESCRIPTORS,
    NOT_YET,
    SHRINK,
    SPAWN,
    STATUS,
    SWEEP,
    ancillary_data,
    descriptors_in,
    frame,
    parse,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_AGENT_EXIT_WINDOW = 0.5
"""Seconds between the end of the connection and the agent's end, within which they count as one."""
_EIO, _EMFILE = 5, 24


class Reaper:
    """The one object of the guardian's process.

    Args:
        link: the connection to the agent.
        agent: a pidfd of the agent.
        family: what is below this process.
    """

    def __init__(self, link: socket, agent: int, family: ProcessTree) -> None:
        self._link = link
        self._agent = agent
        self._tree = family
        self._signal = process_setup.signals()
        self._inherited = {number for number in self._signal.valid_signals() if self._ignored(number)}
        self._buffer = bytearray()
        self._received: list[int] = []
        self._sweep: int | None = None
        self._cleanup: tuple[list[bytes], list[bytes]] = ([], [])
        self._released = False

    def run(self) -> None:
        """Serve until the agent is gone or lets go; then leave nothing."""
        poller = select.poll()
        for fd in (self._link.fileno(), self._agent, self._tree.wake):
            poller.register(fd, select.POLLIN)
        gone = False
        while not gone and not self._released:
            events = poller.poll(None if self._sweep is None else SWEEP_INTERVAL * 1000)
            self._tree.reap()
            for fd, _ in events:
                gone |= fd == self._agent or (fd == self._link.fileno() and not self._receive())
            if self._sweep is not None and not self._tree.sweep():
                self._end_sweep()
        self._end()

    def _end_sweep(self) -> None:
        number, self._sweep = self._sweep, None
        if number is not None:
            self._answer(number, None)

    def _end(self) -> None:
        """Kill all; if the agent is gone too, remove what it wanted removed."""
        self._tree.end(LAST_TIMEOUT)
        if self._released:
            return
        poller = select.poll()
        poller.register(self._agent, select.POLLIN)
        if poller.poll(_AGENT_EXIT_WINDOW * 1000):
            empty, whole = self._cleanup
            for path in empty:
                process_setup.remove(path, whole=False)
            for path in whole:
                process_setup.remove(path, whole=True)

    # Requests

    def _receive(self) -> bool:
        """Read what has come and do what is whole; False at the end of the connection."""
        room = 32 * MAX_DESCRIPTORS
        try:
            data, ancillary, _, _ = self._link.recvmsg(1 << 18, room, MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._received += descriptors_in(ancillary)
        self._buffer += data
        while not self._released and (message := parse(self._buffer)) is not None:
            self._handle(message)
        return bool(data)

    def _handle(self, message: tuple[Any, ...]) -> None:
        number, name, *arguments = message
        if name == SPAWN:
            self._spawn(number, *arguments)
        elif name == STATUS:
            self._tree.reap()
            unknown = NOT_YET if arguments[0] in self._tree.started else None
            self._answer(number, self._tree.exits.pop(arguments[0], unknown))
        elif name == SWEEP:
            self._sweep = number
            self._tree.begin_sweep(arguments[0])
        elif name == GIVE_UP:
            self._tree.give_up()
            self._end_sweep()
        elif name == KILL:
            self._tree.reap()
            if arguments[0] in self._tree.started:
                posix.kill(arguments[0], SIGKILL)
            self._answer(number, None)
        elif name == ADOPT:
            self._take_signals()
            self._answer(number, self._tree.watch_orphan(arguments[0]))
        elif name == HEARD:
            self._answer(number, self._take_signals())
        elif name == CLEANUP:
            self._cleanup = (arguments[0], arguments[1])
            self._answer(number, None)
        elif name == SHRINK:
            process_setup.trim_memory()
        else:
            self._released = True

    def _answer(self, number: int, answer: object, descriptors: list[int] | None = None) -> None:
        self._link.setblocking(True)
        try:
            self._link.sendmsg([frame((number, answer))], ancillary_data(descriptors or []))
        except OSError:  # the agent is gone, which is found elsewhere
            pass
        finally:
            self._link.setblocking(False)

    def _spawn(
        self,
        number: int,
        programs: list[bytes],
        arguments: list[bytes],
        environment: dict[bytes, bytes],
        descriptors: list[int],
        ignored: list[int],
        mask: list[int],
        umask: int,
        cpus: list[int],
        kept: bool,
    ) -> None:
        """Start a worker in a session of its own. The first of the descriptors that were sent is its folder."""
        count = 1 + sum(place >= 0 for place in descriptors)
        sent, self._received = self._received[:count], self._received[count:]
        pidfd = -1
        if not kept:  # which no sweep touches, so that one which runs can go on
            self._end_sweep()
        try:
            if len(sent) < count:
                raise OSError(_EMFILE, "")
            self._take_signals()
            posix.fchdir(sent[0])
            posix.umask(umask)
            self._set_ignored(set(ignored))
            pid = _start_on(cpus, programs, arguments, environment, _actions(descriptors, sent), mask)
            self._tree.started.add(pid)
            if kept:
                self._tree.exclude(pid)
            pidfd = posix.pidfd_open(pid)
            self._answer(number, pid, [pidfd])
        except OSError as error:
            self._answer(number, -(error.errno or _EIO))
        finally:
            for fd in (*sent, pidfd):
                if fd >= 0:
                    posix.close(fd)

    def _take_signals(self) -> list[int]:
        """What this process was sent since this was last called: the kernel keeps it, as all but SIGCHLD is blocked.

        A worker that is started has not been sent what came before, which is forgotten then.
        """
        pending = {int(number) for number in self._signal.sigpending()} - {SIGCHLD}
        for number in pending:
            self._signal.sigtimedwait([number], 0)
        return sorted(pending)

    def _ignored(self, number: int) -> bool:
        return bool(self._signal.getsignal(number) == self._signal.SIG_IGN) and number not in (SIGPIPE, SIGXFSZ)

    def _set_ignored(self, wanted: set[int]) -> None:
        """Ignore just these, so that a worker does too. They are blocked here anyway."""
        wanted &= self._signal.valid_signals()  # those of the C library cannot be set, and stay as they are
        wanted -= {SIGCHLD, SIGPIPE, SIGXFSZ}
        for number in wanted ^ self._inherited:
            self._signal.signal(number, self._signal.SIG_IGN if number in wanted else self._signal.SIG_DFL)
        self._inherited = wanted


def _actions(descriptors: list[int], sent: list[int]) -> list[tuple[int, ...]]:
    """What `posix_spawn` does for descriptors 0, 1 and 2. Those that were sent have higher numbers."""
    return [
        (posix.POSIX_SPAWN_CLOSE, target) if place < 0 else (posix.POSIX_SPAWN_DUP2, sent[place + 1], target)
        for target, place in enumerate(descriptors)
    ]


def _start(
    programs: list[bytes],
    arguments: list[bytes],
    environment: dict[bytes, bytes],
    actions: list[tuple[int, ...]],
    mask: list[int],
) -> int:
    """The pid of the first of `programs` that can be executed.

    Raises:
        OSError: none can; with the first reason that is more than that there is no such file.
    """
    reason: OSError | None = None
    for program in programs:
        try:
            return posix.posix_spawn(
                program,
                arguments,
                environment,
                file_actions=actions,
                setsid=True,
                setsigmask=mask,
                setsigdef=[SIGPIPE, SIGXFSZ],  # Python ignores them, as every program that expects it should not
            )
        except OSError as error:
            if reason is None or isinstance(reason, (FileNotFoundError, NotADirectoryError)):
                reason = error
    assert reason is not None
    raise reason


def _start_on(cpus: list[int], *request: Any) -> int:
    """`_start`, with a process that may run on these processors alone; all that we may use, if none are named."""
    if not cpus:
        return _start(*request)
    ours = posix.sched_getaffinity(0)
    posix.sched_setaffinity(0, cpus)  # what is started inherits it
    try:
        return _start(*request)
    finally:
        posix.sched_setaffinity(0, ours)


def run_reaper(link: int, agent: int) -> None:
    """Be the guardian of the process whose connection and pidfd have these numbers."""
    for fd in (link, agent):
        posix.set_inheritable(fd, False)
    family = ProcessTree(process_setup.sigchld_fd())
    connection = socket(fileno=link)
    connection.setblocking(False)
    Reaper(connection, agent, family).run()
    posix._exit(0)
