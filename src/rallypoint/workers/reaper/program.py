"""The reaper and its supervisor: the program that the agent starts. The two watch each other.

agent -> supervisor -> reaper -> workers (each in its own session). The agent starts the supervisor, which forks the
reaper and only waits for it to end. Both are subreapers and share a session. Everything that a worker spawns stays
below the reaper, however it tries to leave (its own session, two forks, an empty environment). If the reaper is killed,
the supervisor inherits its children.

Laws:

1. When the reaper is gone, the supervisor kills everything left below, then ends as the reaper did. When the supervisor
   is gone, the agent closes the connection. So SIGKILL to any single process leaves nothing behind.
2. When the agent is gone, for any reason, the reaper kills everything below it, removes what the agent asked it to
   remove, writes the agent's record, and ends. When the agent closes the reaper, the reaper ends in the same way, but
   removes and writes nothing.
3. Both adopt all orphans below them, if the kernel permits. Only SIGKILL ends them. They keep nothing open that belongs
   to the agent.
4. Both wake only for a request or when a child or the agent ends; while they kill, or a fence is set, also for a timer.
5. Both import only built-in modules (`os`, `signal` and `socket` would double the time until the reaper is ready),
   `protocol`, `base.pidfds` and `base.process_table`. The packages above are empty here (see `client`). Modules that
   only the reaper needs are also imported before the fork: after it, each page that an import touches would be copied.
6. The agent never uses a pid: it gets a pidfd for each worker. Without pidfds (Linux before 5.3, sandboxes), it gets
   the end of a pipe, which is closed after the worker is reaped, and sends signals through the reaper.
7. A worker inherits the agent's current settings: folder, umask, signal mask, ignored signals, descriptors.
8. The reaper records the signals that it receives. Like each worker it is below the agent in its own session, so a
   sender whose signal reached the reaper also signalled the workers (`agent/signals`).

Laws for the processes below one process:

1. A child that ended is reaped at once.
2. A process is killed through its pidfd after checking that this still refers to the process that was found; without
   pidfds, through its pid right after the same check.
3. A sweep kills nothing that starts after the sweep began, and waits only once for a process that survives SIGKILL. It
   can begin with one SIGTERM to each process.
4. Every sweep, but not `end`, spares an excluded process with its descendants.
5. A process that one sweep spares is spared with its descendants and the session that it leads.
"""

from __future__ import annotations

import posix
import select
import time
from _socket import socket

from rallypoint.base.pidfds import HAS_PIDFDS
from rallypoint.base.process_table import ProcessStat, descendants, process_table, read_stat, signal_process
from rallypoint.workers.reaper import protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import Any

_signal = __import__("_signal")
"""The module below `signal`, which turns all its constants into enums, for 4 ms and 1 MB."""
SIGKILL, SIGPIPE, SIGTERM, SIGCHLD, SIGCONT, SIGXFSZ = 9, 13, 15, 17, 18, 25
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36

SWEEP_INTERVAL = 0.05
"""Seconds between passes of a sweep; each end of a child also causes a pass."""
LAST_TIMEOUT = 10.0
"""Seconds that the reaper and the supervisor wait, before they end, for processes that survive SIGKILL."""


class ProcessTree:
    """Processes below this process.

    Args:
        wake: the reading end of a pipe that becomes readable when children end.
    """

    def __init__(self, wake: int) -> None:
        self.wake = wake
        self.started: set[int] = set()
        """Children whose exit codes matter, until they are reaped."""
        self.exits: dict[int, int] = {}
        """Exit codes of reaped children, -N for a signal."""
        self._pipes: dict[int, list[int]] = {}
        """Without pidfds: the writing ends to close when a child ends."""
        self._kill_at = 0.0
        self._terminated: set[tuple[int, int]] = set()
        self._stuck: set[tuple[int, int]] = set()
        self._excluded: set[int] = set()
        self._spared: set[int] = set()
        """Children that the last sweep spares."""

    def open_child(self, pid: int) -> int:
        """Open a descriptor, which the caller closes, that becomes readable when this child ends. Raises OSError."""
        if HAS_PIDFDS:
            return posix.pidfd_open(pid)
        reading, writing = posix.pipe()
        self._pipes.setdefault(pid, []).append(writing)
        return reading

    def send_signal(self, pids: Collection[int], number: int) -> None:
        """Signal those of these children that are workers, or might become workers. None of them has been reaped."""
        for pid in (self.started | self._excluded).intersection(pids):
            try:  # noqa: SIM105 - contextlib is not built in
                posix.kill(pid, number)
            except OSError:  # it now runs as another user
                pass

    def watch_child(self, pid: int, excluded: bool) -> None:
        """Watch a child that was started as a worker; if `excluded`, every sweep spares it and its descendants."""
        self.started.add(pid)
        self.exits.pop(pid, None)  # left by an earlier process
        if excluded:
            self._excluded.add(pid)

    def watch_orphan(self, pid: int, excluded: bool) -> bool:
        """Adopt a descendant that will become our child. Returns whether it exists.

        Args:
            pid: its pid.
            excluded: whether sweeps spare it and its exit code is ignored; otherwise its exit code is recorded from now
                on.
        """
        # Suppose a waiting copy is killed:
        #   1. we reap it, and an unrelated process gets its pid;
        #   2. the agent, which has not looked at its pidfd yet, asks us to adopt this pid as a worker.
        # The unrelated process is not below us. The pid of a child that we have not reaped cannot be reused.
        if not self._is_below(pid):
            return False
        if excluded:
            self._excluded.add(pid)
        else:
            self._excluded.discard(pid)
            self.started.add(pid)
        return True

    def _is_below(self, pid: int) -> bool:
        me, seen = posix.getpid(), set[int]()
        while pid != me and pid not in seen and (stat := read_stat(pid)) is not None:
            seen.add(pid)
            pid = stat.parent
        return pid == me and bool(seen)

    def reap(self) -> bool:
        """Reap all children that ended; returns whether others exist."""
        try:  # noqa: SIM105 - contextlib is not built in
            posix.read(self.wake, 4096)
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = posix.waitpid(-1, posix.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            self._excluded.discard(pid)
            self._spared.discard(pid)
            if pid in self.started:
                self.started.discard(pid)
                self.exits[pid] = posix.waitstatus_to_exitcode(status)
            for pipe in self._pipes.pop(pid, ()):
                posix.close(pipe)

    def begin_sweep(self, seconds: float, spared: Collection[int] = ()) -> None:
        """Make `sweep` send SIGTERM to everything below, except the spared, and SIGKILL after this many seconds."""
        self._kill_at = time.monotonic() + seconds
        self._spared = self.started.intersection(spared)
        self._terminated.clear()

    def sweep(self) -> bool:
        """Make one pass: signal everything below. Returns whether it found anything, apart from stuck processes."""
        if not self.reap() or self._only_excluded():  # without other children nothing is below this process
            return False
        try:
            victims = self._own_descendants({pid: stat for pid, stat in process_table().items() if not stat.ended})
            kills = time.monotonic() >= self._kill_at
            for victim in victims:
                if kills:
                    signal_process(victim, SIGKILL)
                elif victim.key not in self._terminated:
                    self._terminated.add(victim.key)
                    signal_process(victim, SIGTERM, SIGCONT)  # a stopped process handles SIGTERM only when it continues
            if any(victim.key not in self._stuck for victim in victims):
                return True
            return self.reap() and self._has_other_children()
        except OSError:  # such as no free descriptor: try again
            return True

    def give_up(self) -> None:
        """Never again wait for the processes that are left now."""
        try:
            self._stuck = {stat.key for stat in self._own_descendants(process_table())}
        except OSError:
            return

    def end(self, seconds: float) -> None:
        """Kill everything, and wait this long for processes that do not end at once."""
        until = time.monotonic() + seconds
        self._excluded.clear()
        self.begin_sweep(0.0)
        poller = select.poll()
        poller.register(self.wake, select.POLLIN)
        while self.sweep() and time.monotonic() < until:
            poller.poll(SWEEP_INTERVAL * 1000)

    def _own_descendants(self, found: dict[int, ProcessStat]) -> list[ProcessStat]:
        """Our descendants that are not excluded. An adopted process may be below an excluded one for a moment."""
        me = posix.getpid()
        parents = {pid: me if pid in self.started else stat.parent for pid, stat in found.items()}
        spared = self._excluded | self._spared
        if self._spared:
            spared |= {pid for pid, stat in found.items() if stat.session in self._spared}
        return [found[pid] for pid in descendants(me, parents, spared)]

    def _has_other_children(self) -> bool:
        """Whether any child is neither stuck nor excluded. Call this only if there are children."""
        spared = self._excluded | self._spared
        if not self._stuck and not spared:
            return True
        me = posix.getpid()
        return any(
            (stat.parent == me or pid in self.started)
            and pid not in spared
            and stat.session not in self._spared
            and stat.key not in self._stuck
            for pid, stat in process_table().items()
        )

    def _only_excluded(self) -> bool:
        """Whether the kernel's list of our children, if available, names only spared ones.

        The list is exact: in a single-threaded process, only this thread's own `waitpid` removes entries.
        """
        spared = self._excluded | self._spared
        if not spared or self.started - spared:
            return False
        me = posix.getpid()
        try:
            fd = posix.open(f"/proc/self/task/{me}/children", posix.O_RDONLY | posix.O_CLOEXEC)
        except OSError:
            return False
        try:
            return set(map(int, posix.read(fd, 4096).split())) <= spared
        except OSError:
            return False
        finally:
            posix.close(fd)


_AGENT_EXIT_WINDOW = 0.5
"""Seconds within which the end of the connection and the agent's end count as one event."""
_FENCE_CHECK = 0.5
"""Maximum seconds between checks of the clock for a fence: `poll` does not count time in suspension."""
_EIO, _EMFILE = 5, 24
_NEVER = float("inf")


class Reaper:
    """The reaper, one per process.

    Args:
        link: the connection to the agent.
        agent: a pidfd of the agent, or a pipe into which the supervisor writes when the agent ends.
        tree: the processes below this one.
    """

    def __init__(self, link: protocol.Connection, agent: int, tree: ProcessTree) -> None:
        self._link = link
        self._agent = agent
        self._tree = tree
        self._signal = _signal
        self._inherited = {number for number in self._signal.valid_signals() if self._ignored(number)}
        self._received: list[int] = []
        """Received descriptors that no request has used yet."""
        self._sweep_pipe = -1
        """The pipe that receives a byte when the running sweep ends; -1 if none is running."""
        self._fence_at = _NEVER
        """When to kill everything unless the agent postpones it, on CLOCK_BOOTTIME."""
        self._fencing = False
        """Whether that time passed, while some processes might still be alive."""
        self._cleanup: tuple[list[bytes], list[bytes]] = ([], [])
        self._record: tuple[bytes, int, bytes] | None = None
        self._closed = False

    def run(self) -> None:
        """Serve until the agent is gone or closes the connection, then leave nothing behind."""
        poller = select.poll()
        for fd in (self._link.socket.fileno(), self._agent, self._tree.wake):
            poller.register(fd, select.POLLIN)
        gone = False
        while not gone and not self._closed:
            events = poller.poll(self._timeout())
            self._tree.reap()
            for fd, _ in events:
                gone |= fd == self._agent or (fd == self._link.socket.fileno() and not self._receive())
            if self._fence_at < _NEVER and time.clock_gettime(time.CLOCK_BOOTTIME) >= self._fence_at:
                self._fence_at, self._fencing = _NEVER, True
                self._tree.begin_sweep(0.0)
            if (self._fencing or self._sweep_pipe >= 0) and not self._tree.sweep():
                self._end_sweep()
        self._end()

    def _timeout(self) -> float | None:
        """Milliseconds until work is due that no descriptor announces; None for never."""
        if self._fencing or self._sweep_pipe >= 0:
            return SWEEP_INTERVAL * 1000
        if self._fence_at == _NEVER:
            return None
        left = self._fence_at - time.clock_gettime(time.CLOCK_BOOTTIME)
        return max(0.0, min(left, _FENCE_CHECK)) * 1000

    def _end(self) -> None:
        """Kill everything. If the agent is gone, also remove what it asked to remove."""
        self._tree.end(LAST_TIMEOUT)
        if self._closed:
            return
        poller = select.poll()
        poller.register(self._agent, select.POLLIN)
        # End of file without a byte: the supervisor ended, not the agent.
        if any(events & select.POLLIN for _, events in poller.poll(_AGENT_EXIT_WINDOW * 1000)):
            for whole, paths in enumerate(self._cleanup):
                for path in paths:
                    remove(path, whole=bool(whole))
            if self._record is not None:
                write_record(*self._record)

    # Requests

    def _receive(self) -> bool:
        """Read what arrived, and handle complete requests; False at the end of the connection."""
        try:
            self._received += self._link.receive()
        except BlockingIOError:
            return True
        except (OSError, EOFError):
            return False
        while not self._closed and (message := protocol.parse(self._link.buffer)) is not None:
            name, *arguments = message
            self._REQUESTS[name](self, *arguments)
        return True

    def _take(self, count: int) -> list[int]:
        taken, self._received = self._received[:count], self._received[count:]
        return taken

    def _answer(self, answer: object, descriptors: Sequence[int] = ()) -> None:
        self._link.socket.setblocking(True)
        try:
            self._link.send((answer,), descriptors)
        except OSError:  # the agent is gone, which is detected elsewhere
            pass
        finally:
            self._link.socket.setblocking(False)

    def _spawn(
        self,
        environment: dict[bytes, bytes],
        settings: tuple[list[int], list[int], int],
        excluded: bool,
        workers: list[tuple[list[bytes], dict[bytes, bytes], list[int], list[int]]],
    ) -> None:
        """Start workers, each in its own session. If one cannot be started, leave none."""
        ignored, mask, umask = settings
        count = 1 + max([0, *(place for _, _, places, _ in workers for place in places)])
        sent = self._take(count)
        pids: list[int] = []
        descriptors: list[int] = []
        if not excluded:  # no sweep touches excluded workers, so a running sweep can continue
            self._end_sweep()
        try:
            if len(sent) < count:
                raise OSError(_EMFILE, "")
            self._take_signals()
            posix.fchdir(sent[0])
            posix.umask(umask)
            self._set_ignored(set(ignored))
            for arguments, own, places, cpus in workers:
                pids.append(_start_on(cpus, arguments, {**environment, **own}, _actions(places, sent), mask))
                self._tree.watch_child(pids[-1], excluded)
                descriptors.append(self._tree.open_child(pids[-1]))
            self._answer(pids, descriptors)
        except OSError as error:
            self._tree.send_signal(pids, SIGKILL)
            self._answer(-(error.errno or _EIO))
        finally:
            for fd in (*sent, *descriptors):
                posix.close(fd)

    def _status(self, pid: int) -> None:
        self._tree.reap()
        exits, self._tree.exits = self._tree.exits, {}
        self._answer((exits, pid in self._tree.started))

    def _send_signal(self, pids: list[int], number: int) -> None:
        self._tree.send_signal(pids, number)

    def _adopt(self, pid: int, excluded: bool, opened: bool) -> None:
        if not excluded:
            self._take_signals()
        exists = self._tree.watch_orphan(pid, excluded)
        descriptors = []
        if exists and opened:
            try:  # noqa: SIM105 - contextlib is not built in
                descriptors.append(self._tree.open_child(pid))
            except OSError:  # no descriptor is free
                pass
        self._answer(exists, descriptors)
        for fd in descriptors:
            posix.close(fd)

    def _tell_signals(self) -> None:
        self._answer(self._take_signals())

    def _set_cleanup(self, empty: list[bytes], whole: list[bytes]) -> None:
        self._cleanup = (empty, whole)

    def _set_record(self, folder: bytes, agent: int, text: bytes) -> None:
        self._record = folder, agent, text

    def _begin_sweep(self, seconds: float, spared: list[int]) -> None:
        self._end_sweep()
        # If no descriptor is free for the pipe, the agent finds it closed; the sweep continues anyway.
        self._sweep_pipe = next(iter(self._take(1)), -1)
        self._tree.begin_sweep(seconds, spared)

    def _end_sweep(self) -> None:
        pipe, self._sweep_pipe, self._fencing = self._sweep_pipe, -1, False
        if pipe >= 0:
            try:  # noqa: SIM105 - contextlib is not built in
                posix.write(pipe, b"\0")
            except OSError:  # the agent is no longer waiting for it
                pass
            posix.close(pipe)

    def _give_up(self) -> None:
        self._tree.give_up()
        self._end_sweep()

    def _fence(self, until: float) -> None:
        self._fence_at = until

    def _close(self) -> None:
        self._closed = True

    _REQUESTS: dict[str, Any] = {  # noqa: RUF012 - a table, never changed
        protocol.SPAWN: _spawn,
        protocol.STATUS: _status,
        protocol.SIGNAL: _send_signal,
        protocol.ADOPT: _adopt,
        protocol.SIGNALS: _tell_signals,
        protocol.CLEANUP: _set_cleanup,
        protocol.RECORD: _set_record,
        protocol.SWEEP: _begin_sweep,
        protocol.GIVE_UP: _give_up,
        protocol.FENCE: _fence,
        protocol.CLOSE: _close,
    }

    # Signals

    def _take_signals(self) -> list[int]:
        """Signals that this process received since the last call: the kernel queues them, because all except SIGCHLD
        are blocked.

        Also called to drop the signals when a worker is started, since it did not receive them.
        """
        pending = {int(number) for number in self._signal.sigpending()} - {SIGCHLD}
        for number in pending:
            self._signal.sigwait([number])  # returns at once
        return sorted(pending)

    def _ignored(self, number: int) -> bool:
        return bool(self._signal.getsignal(number) == self._signal.SIG_IGN) and number not in (SIGPIPE, SIGXFSZ)

    def _set_ignored(self, wanted: set[int]) -> None:
        """Ignore exactly these signals, so that a worker does too. Here they are blocked anyway."""
        wanted &= self._signal.valid_signals()  # the C library's signals cannot be set, and stay as they are
        wanted -= {SIGCHLD, SIGPIPE, SIGXFSZ}
        for number in wanted ^ self._inherited:
            self._signal.signal(number, self._signal.SIG_IGN if number in wanted else self._signal.SIG_DFL)
        self._inherited = wanted


def _actions(places: list[int], sent: list[int]) -> list[tuple[int, ...]]:
    """File actions of `posix_spawn` for descriptors 0, 1 and 2. Sent descriptors have higher numbers."""
    return [
        (posix.POSIX_SPAWN_CLOSE, target) if place < 0 else (posix.POSIX_SPAWN_DUP2, sent[place], target)
        for target, place in enumerate(places)
    ]


def _start(
    arguments: list[bytes],
    environment: dict[bytes, bytes],
    actions: list[tuple[int, ...]],
    mask: list[int],
) -> int:
    """Start the first executable program with this name on its PATH. Returns the pid.

    Raises:
        OSError: no program can be executed; contains the first reason other than a missing file.
    """
    reason: OSError | None = None
    name = arguments[0]
    folders = [b""] if b"/" in name else environment.get(b"PATH", b"/bin:/usr/bin").split(b":")
    for program in (folder + b"/" + name if folder else name for folder in folders):
        try:
            posix.stat(program)  # starting a process that then finds no program takes a hundred times as long
            return posix.posix_spawn(
                program,
                arguments,
                environment,
                file_actions=actions,
                setsid=True,
                setsigmask=mask,
                setsigdef=[SIGPIPE, SIGXFSZ],  # Python ignores them, which other programs do not expect
            )
        except OSError as error:
            if reason is None or isinstance(reason, (FileNotFoundError, NotADirectoryError)):
                reason = error
    assert reason is not None
    raise reason


def _start_on(cpus: list[int], *request: Any) -> int:
    """`_start` on these processors only, or on all that we may use if the list is empty."""
    if not cpus:
        return _start(*request)
    ours = posix.sched_getaffinity(0)
    posix.sched_setaffinity(0, cpus)  # the new process inherits it
    try:
        return _start(*request)
    finally:
        posix.sched_setaffinity(0, ours)


# Preparations of both processes


def become_subreaper() -> None:
    """Adopt the orphans below this process. Raises OSError if the kernel is older than 3.4, or a sandbox denies it."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    """Call prctl(2), which Python does not wrap. `ctypes` could too, but takes 2 ms more."""
    ctypes = __import__("_ctypes")
    try:
        prctl = ctypes.dlsym(ctypes.dlopen(None, 2), "prctl")
        refused = ctypes.call_function(prctl, (option, value, 0, 0, 0))
    except AttributeError:  # these names are private
        refused = __import__("ctypes").CDLL(None).prctl(option, value, 0, 0, 0)
    if refused:
        raise OSError(f"this kernel has no prctl({option})")


def sigchld_fd() -> int:
    """Block all signals except SIGCHLD. Returns a descriptor that becomes readable at each SIGCHLD."""
    signal = _signal
    reading, writing = posix.pipe()
    for fd in (reading, writing):
        posix.set_blocking(fd, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(SIGCHLD, lambda _number, _frame: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, set(signal.valid_signals()) - {SIGCHLD})
    return reading


def close_inherited(kept: set[int]) -> None:
    """Close descriptors that the agent inherited. 0 and 1 then lead nowhere; 2 stays open for error messages."""
    # Close them by name: without close_range(2) in the kernel, `closerange` tries every possible number.
    try:
        numbers = [int(name) for name in posix.listdir("/proc/self/fd")]
    except FileNotFoundError:
        numbers = list(range(3, posix.sysconf("SC_OPEN_MAX")))
    for fd in numbers:
        if fd > 2 and fd not in kept:
            try:  # noqa: SIM105 - contextlib is not built in
                posix.close(fd)
            except OSError:  # the descriptor used for listing
                pass
    for target in (0, 1, 2):
        if target == 2 and _is_open(2):
            continue
        null = protocol.open_null()
        if null != target:
            posix.dup2(null, target, inheritable=False)
            posix.close(null)


def _is_open(fd: int) -> bool:
    try:
        posix.fstat(fd)
    except OSError:
        return False
    return True


def _unlink(path: bytes) -> None:
    try:  # noqa: SIM105 - contextlib is not built in
        posix.unlink(path)
    except OSError:
        pass


def write_record(folder: bytes, agent: int, text: bytes) -> None:
    """Write the text, and a line with the time, to a file named after the time and the agent's pid."""
    now = time.time()
    flags = posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_NOFOLLOW | posix.O_CLOEXEC
    try:
        fd = posix.open(b"%s/%014d-%d" % (folder, 1000 * now, agent), flags, 0o600)
        posix.write(fd, b"%sended: %.6f\n" % (text, now))
        posix.close(fd)
    except OSError:
        pass


def remove(path: bytes, *, whole: bool) -> None:
    """Remove a folder and everything below it (`whole`), or only empty folders."""
    try:
        names = posix.listdir(path)
    except NotADirectoryError:  # the watchdog's pipe
        if whole:
            _unlink(path)
        return
    except OSError:
        return
    for name in names:
        inner = path + b"/" + name
        try:
            folder = posix.lstat(inner).st_mode & 0o170000 == 0o040000
            if folder:
                remove(inner, whole=whole)
            elif whole:
                posix.unlink(inner)
        except OSError:
            pass
    try:  # noqa: SIM105 - contextlib is not built in
        posix.rmdir(path)
    except OSError:
        pass


def main(arguments: list[str]) -> None:
    """Run the supervisor, and in a fork the reaper, for the process whose connection and pidfd have these numbers.
    Without pidfds, the second number is that process's pid."""
    link, agent = map(int, arguments[:-1])
    _exit_if_denied(101, posix.setsid)
    close_inherited({link, agent} if HAS_PIDFDS else {link})
    _exit_if_denied(102, become_subreaper)
    parent, pipe = 0, -1
    if not HAS_PIDFDS:
        parent = agent
        agent, pipe = posix.pipe()
        # Request SIGCHLD when the agent ends. It also arrives if only the thread that started us ends, so `_supervise`
        # checks.
        _exit_if_denied(103, lambda: _prctl(_SET_PDEATHSIG, SIGCHLD))
    reaper = posix.fork()
    if reaper:
        posix.close(link)
        posix.close(agent)
        _supervise(reaper, parent, pipe)
    if pipe >= 0:
        posix.close(pipe)
    become_subreaper()  # a fork does not inherit this
    for fd in (link, agent):
        posix.set_inheritable(fd, False)
    tree = ProcessTree(sigchld_fd())
    connection = protocol.Connection(socket(fileno=link))
    connection.socket.setblocking(False)
    Reaper(connection, agent, tree).run()
    posix._exit(0)


def _exit_if_denied(code: int, call: Callable[[], None]) -> None:
    """Make a call that might be denied. If it is, exit with a code, which the agent turns into a text
    (`protocol.DENIED`)."""
    try:
        call()
    except OSError:
        posix._exit(code)


def _supervise(reaper: int, agent: int, pipe: int) -> None:
    """Supervise the reaper: wait until it ends, kill everything it left, and end with the same status. Without pidfds
    (`agent` is not 0), write into the pipe when the agent ends."""
    tree = ProcessTree(sigchld_fd())
    tree.started.add(reaper)
    poller = select.poll()
    poller.register(tree.wake, select.POLLIN)
    tree.reap()
    while reaper not in tree.exits:
        if agent and posix.getppid() != agent:
            agent = 0
            try:  # noqa: SIM105 - contextlib is not built in
                posix.write(pipe, b"\0")
            except OSError:  # the reaper ended
                pass
        poller.poll()
        tree.reap()
    code = tree.exits[reaper]
    tree.end(LAST_TIMEOUT if code else 0.0)  # a reaper that ended normally already waited
    if code == -SIGKILL:
        posix.kill(posix.getpid(), SIGKILL)
    posix._exit(code if code >= 0 else 128 - code)
