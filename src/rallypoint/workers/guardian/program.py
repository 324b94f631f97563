"""The guardian's own program, and the frames in which it and its agent speak.

agent -> keeper -> guardian -> workers (each in a session of its own). The keeper is what the agent has started; it
forks the guardian and does nothing but wait for its end. Both are subreapers in one session of their own: whatever a
worker spawns stays below the guardian, however it leaves (a session of its own, two forks, an empty environment), and
what a guardian that is killed leaves falls to the keeper.

Laws:

1. When the agent is gone, by whatever, all that is below the guardian is killed, then what the agent had asked to be
   removed is removed, then the guardian ends. It ends alike, without the removing, when the agent lets go of it.
2. When the guardian is gone, all that it left is killed, then the keeper ends as the guardian did. When the keeper is
   gone, the agent lets go. So there is no one process whose SIGKILL leaves anything.
3. A child that has ended is reaped at once. The agent never uses a pid: it gets a pidfd with each worker.
4. A worker starts with what the agent has at that moment: folder, umask, signal mask, ignored signals, descriptors.
5. They wake for a cause only: a request, the end of a child, the agent's end; while they kill, also by a timer.
6. A sweep kills nothing that is started after it was begun, and what has once outlived SIGKILL is not waited for again.

The file runs by itself (`python -I -S`) and is imported by the agent for its frames, so it uses built-in modules only:
`os`, `signal` and `socket` would double the time until it is ready. Frames are `marshal` behind a length: both ends are
ours, on one host, under one interpreter.
"""

from __future__ import annotations

import marshal
import posix
import select
import sys
import time
from _socket import MSG_CMSG_CLOEXEC, SCM_RIGHTS, SOL_SOCKET, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

SPAWN, STATUS, KILL, SWEEP, GIVE_UP = "spawn", "status", "kill", "sweep", "give up"
CLEANUP, SHRINK, CLOSE = "cleanup", "shrink", "close"
"""The requests `(number, name, *arguments)`; they are answered by `(number, answer)`, a sweep when it is over.

SPAWN  programs, arguments, environment, descriptors, ignored signals, mask, umask -> pid and a pidfd, or minus errno
STATUS pid  -> exit code (-N for a signal), and forgets it; NOT_YET while it is not reaped, None if it is not known
KILL   pid  -> nothing; SIGKILL to one worker
SWEEP       -> nothing; SIGKILL to all that is below, again and again until nothing is left, or until
GIVE_UP     it is given up: no answer of its own
CLEANUP folders to remove where they are empty, folders to remove whole -> nothing
SHRINK      no answer; there is time to give memory back
CLOSE       no answer
"""

NOT_YET = "not yet"

CLOSED = -1
"""In `descriptors` of SPAWN (for 0, 1 and 2, which of the sent ones it shall be): the worker starts without it."""

MOST_DESCRIPTORS = 4
_HEAD = 4
_AGAIN = 0.05
"""Seconds between two looks while something is being killed, beside the looks at each end of a child."""
_LAST_PATIENCE = 10.0
"""Seconds that the guardian stays for what does not even end on SIGKILL, when the agent is gone."""
_FAREWELL = 0.5
"""Seconds between the end of the connection and the agent's end, within which they count as one."""
_SIGKILL, _SIGPIPE, _SIGCHLD, _SIGXFSZ = 9, 13, 17, 25
_EIO, _EMFILE = 5, 24
_SET_CHILD_SUBREAPER, _MADV_DONTNEED = 36, 4


def frame(message: tuple[Any, ...]) -> bytes:
    """The bytes of a message."""
    body = marshal.dumps(message)
    return len(body).to_bytes(_HEAD, "little") + body


def parse(buffer: bytearray) -> tuple[Any, ...] | None:
    """Take the first message off the buffer; None if it is not whole yet."""
    if len(buffer) < _HEAD:
        return None
    end = _HEAD + int.from_bytes(buffer[:_HEAD], "little")
    if len(buffer) < end:
        return None
    message: tuple[Any, ...] = marshal.loads(bytes(buffer[_HEAD:end]))
    del buffer[:end]
    return message


def descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came with a message."""
    found: list[int] = []
    for level, kind, data in ancillary:
        if level == SOL_SOCKET and kind == SCM_RIGHTS:
            found += [int.from_bytes(data[at : at + 4], sys.byteorder) for at in range(0, len(data) - 3, 4)]
    return found


def packed(descriptors: list[int]) -> list[tuple[int, int, bytes]]:
    """The ancillary data that carries descriptors."""
    data = b"".join(fd.to_bytes(4, sys.byteorder) for fd in descriptors)
    return [(SOL_SOCKET, SCM_RIGHTS, data)] if descriptors else []


def below(root: int, parents: dict[int, int]) -> set[int]:
    """The descendants of a process. Pure.

    Args:
        root: its pid.
        parents: pid to parent's pid, of all processes.
    """
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    frontier = [root]
    while frontier:
        new = [pid for parent in frontier for pid in children.get(parent, ()) if pid not in found]
        found.update(new)
        frontier = new
    return found - {root}


class Process:
    """What /proc tells of a process."""

    def __init__(self, parent: int, started: int, ended: bool) -> None:
        self.parent = parent
        self.started = started
        """With the pid, it names one process for ever."""
        self.ended = ended


def processes() -> dict[int, Process]:
    """Every process that can be seen, by pid.

    Raises:
        OSError: /proc cannot be read at the moment: no descriptor is free, say.
    """
    found = {}
    for name in posix.listdir("/proc"):
        if name.isdigit() and (process := _look_up(int(name))) is not None:
            found[int(name)] = process
    return found


def _look_up(pid: int) -> Process | None:
    try:
        fd = posix.open(f"/proc/{pid}/stat", posix.O_RDONLY | posix.O_CLOEXEC)
    except OSError:
        return None
    try:
        line = posix.read(fd, 1024)
    except OSError:
        return None
    finally:
        posix.close(fd)
    # The command name stands in parentheses and may itself hold spaces and parentheses: split after the last one.
    fields = line[line.rfind(b")") + 2 :].split()
    if len(fields) < 20:
        return None
    # A process whose first thread has ended shows as a zombie while its other threads run.
    return Process(int(fields[1]), int(fields[19]), fields[0] in b"ZX" and int(fields[17]) <= 1)


def _signals() -> Any:
    # `signal` makes enums of all its constants, for 4 ms and 1 MB. This is what it is made of.
    return __import__("_signal")


class Family:
    """All that is below this process.

    Args:
        wake: the reading end of the pipe that tells of children which have ended.
    """

    def __init__(self, wake: int) -> None:
        self.wake = wake
        self.started: set[int] = set()
        """Children whose ends matter, as long as they are not reaped."""
        self.exits: dict[int, int] = {}
        """Exit codes of those that were, -N for a signal."""
        self._stuck: set[tuple[int, int]] = set()

    def reap(self) -> bool:
        """Take notice of all children that have ended; returns whether there are others."""
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
            if pid in self.started:
                self.started.discard(pid)
                self.exits[pid] = posix.waitstatus_to_exitcode(status)

    def kill_all(self) -> bool:
        """SIGKILL to all that is below at this moment; returns whether there was anything, but for what is stuck."""
        if not self.reap():  # no child at all: then nothing is below us, and nobody needs to look
            return False
        try:
            found = processes()
            victims = below(posix.getpid(), {pid: each.parent for pid, each in found.items() if not each.ended})
            for pid in victims:
                self._kill(pid)
            if any((pid, found[pid].started) not in self._stuck for pid in victims):
                return True
            return self.reap() and self._has_others()
        except OSError:  # no descriptor is free, say: look again
            return True

    def give_up(self) -> None:
        """Do not wait again for what is left now."""
        try:
            found = processes()
        except OSError:
            return
        left = below(posix.getpid(), {pid: each.parent for pid, each in found.items()})
        self._stuck = {(pid, found[pid].started) for pid in left}

    def end(self, seconds: float) -> None:
        """Kill all, and stay so long for what does not end at once."""
        until = time.monotonic() + seconds
        poller = select.poll()
        poller.register(self.wake, select.POLLIN)
        while self.kill_all() and time.monotonic() < until:
            poller.poll(_AGAIN * 1000)

    def _has_others(self) -> bool:
        """Whether there is a child that is not stuck, where it is known that there is one."""
        if not self._stuck:
            return True
        me = posix.getpid()
        return any(each.parent == me and (pid, each.started) not in self._stuck for pid, each in processes().items())

    @staticmethod
    def _kill(pid: int) -> None:
        try:
            fd = posix.pidfd_open(pid)
        except OSError:
            return
        try:
            # Only now the number can no longer pass to another process: is it still one of ours?
            if _is_below_us(pid):
                _signals().pidfd_send_signal(fd, _SIGKILL)
        except OSError:  # it has ended, or runs as somebody whom we may not kill
            pass
        finally:
            posix.close(fd)


def _is_below_us(pid: int) -> bool:
    root = posix.getpid()
    while pid > 1 and (process := _look_up(pid)) is not None:
        pid = process.parent
        if pid == root:
            return True
    return False


class Guardian:
    """The one object of the guardian's process.

    Args:
        link: the connection to the agent.
        agent: a pidfd of the agent.
        family: what is below this process.
    """

    def __init__(self, link: socket, agent: int, family: Family) -> None:
        self._link = link
        self._agent = agent
        self._family = family
        self._signal = _signals()
        self._inherited = {number for number in self._signal.valid_signals() if self._ignored(number)}
        self._buffer = bytearray()
        self._received: list[int] = []
        self._sweep: int | None = None
        self._cleanup: tuple[list[bytes], list[bytes]] = ([], [])
        self._let_go = False

    def run(self) -> None:
        """Serve until the agent is gone or lets go; then leave nothing."""
        poller = select.poll()
        for fd in (self._link.fileno(), self._agent, self._family.wake):
            poller.register(fd, select.POLLIN)
        gone = False
        while not gone and not self._let_go:
            events = poller.poll(None if self._sweep is None else _AGAIN * 1000)
            self._family.reap()
            for fd, _ in events:
                gone |= fd == self._agent or (fd == self._link.fileno() and not self._receive())
            if self._sweep is not None and not self._family.kill_all():
                self._end_sweep()
        self._end()

    def _end_sweep(self) -> None:
        number, self._sweep = self._sweep, None
        if number is not None:
            self._answer(number, None)

    def _end(self) -> None:
        """Kill all; if the agent is gone too, remove what it wanted removed."""
        self._family.end(_LAST_PATIENCE)
        if self._let_go:
            return
        poller = select.poll()
        poller.register(self._agent, select.POLLIN)
        if poller.poll(_FAREWELL * 1000):
            empty, whole = self._cleanup
            for path in empty:
                remove(path, whole=False)
            for path in whole:
                remove(path, whole=True)

    # Requests

    def _receive(self) -> bool:
        """Read what has come and do what is whole; False at the end of the connection."""
        room = 32 * MOST_DESCRIPTORS
        try:
            data, ancillary, _, _ = self._link.recvmsg(1 << 18, room, MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._received += descriptors_in(ancillary)
        self._buffer += data
        while not self._let_go and (message := parse(self._buffer)) is not None:
            self._do(message)
        return bool(data)

    def _do(self, message: tuple[Any, ...]) -> None:
        number, name, *arguments = message
        if name == SPAWN:
            self._spawn(number, *arguments)
        elif name == STATUS:
            self._family.reap()
            unknown = NOT_YET if arguments[0] in self._family.started else None
            self._answer(number, self._family.exits.pop(arguments[0], unknown))
        elif name == SWEEP:
            self._sweep = number
        elif name == GIVE_UP:
            self._family.give_up()
            self._end_sweep()
        elif name == KILL:
            self._family.reap()
            if arguments[0] in self._family.started:
                posix.kill(arguments[0], _SIGKILL)
            self._answer(number, None)
        elif name == CLEANUP:
            self._cleanup = (arguments[0], arguments[1])
            self._answer(number, None)
        elif name == SHRINK:
            _shrink()
        else:
            self._let_go = True

    def _answer(self, number: int, answer: object, descriptors: list[int] | None = None) -> None:
        self._link.setblocking(True)
        try:
            self._link.sendmsg([frame((number, answer))], packed(descriptors or []))
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
    ) -> None:
        """Start a worker in a session of its own. The first of the descriptors that were sent is its folder."""
        count = 1 + sum(place >= 0 for place in descriptors)
        sent, self._received = self._received[:count], self._received[count:]
        pidfd = -1
        self._end_sweep()
        try:
            if len(sent) < count:
                raise OSError(_EMFILE, "")
            posix.fchdir(sent[0])
            posix.umask(umask)
            self._ignore(set(ignored))
            pid = _start(programs, arguments, environment, _actions(descriptors, sent), mask)
            self._family.started.add(pid)
            pidfd = posix.pidfd_open(pid)
            self._answer(number, pid, [pidfd])
        except OSError as error:
            self._answer(number, -(error.errno or _EIO))
        finally:
            for fd in (*sent, pidfd):
                if fd >= 0:
                    posix.close(fd)

    def _ignored(self, number: int) -> bool:
        return bool(self._signal.getsignal(number) == self._signal.SIG_IGN) and number not in (_SIGPIPE, _SIGXFSZ)

    def _ignore(self, wanted: set[int]) -> None:
        """Ignore just these, so that a worker does too. They are blocked here anyway."""
        wanted &= self._signal.valid_signals()  # those of the C library cannot be set, and stay as they are
        wanted -= {_SIGCHLD, _SIGPIPE, _SIGXFSZ}
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
                setsigdef=[_SIGPIPE, _SIGXFSZ],  # Python ignores them, as every program that expects it should not
            )
        except OSError as error:
            if reason is None or isinstance(reason, (FileNotFoundError, NotADirectoryError)):
                reason = error
    assert reason is not None
    raise reason


def remove(path: bytes, *, whole: bool) -> None:
    """Remove a folder and what is below it: folders as far as they are empty, or everything."""
    try:
        names = posix.listdir(path)
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


def _become_subreaper() -> None:
    """Adopt the orphans below us. Python has no call for it; `ctypes` does it too, for 2 ms more.

    Raises:
        OSError: the kernel is older than 3.4.
    """
    ctypes = __import__("_ctypes")
    try:
        prctl = ctypes.dlsym(ctypes.dlopen(None, 2), "prctl")
        refused = ctypes.call_function(prctl, (_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
    except AttributeError:  # these names are not public
        refused = __import__("ctypes").CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if refused:
        raise OSError("this kernel has no PR_SET_CHILD_SUBREAPER")


def _shrink() -> None:
    """Unmap what only the start-up needed of the interpreter's code: half of what this process holds.

    It is clean and in the page cache, where whatever is needed again is found.
    """
    try:
        ctypes = __import__("_ctypes")
        address = type("address", (ctypes._SimpleCData,), {"_type_": "P"})
        madvise = ctypes.dlsym(ctypes.dlopen(None, 2), "madvise")
        for start, end in _clean_mappings():
            ctypes.call_function(madvise, (address(start), address(end - start), _MADV_DONTNEED))
    except (AttributeError, OSError):  # these names are not public, and the file is not on every kernel
        pass


def _clean_mappings() -> list[tuple[int, int]]:
    """Start and end of the mapped files that are read only and that nothing has been written into."""
    found = []
    mapping: tuple[int, int] | None = None
    for line in _lines("/proc/self/smaps"):
        fields = line.split()
        if len(fields) > 5 and fields[1] in (b"r-xp", b"r--p") and fields[5].startswith(b"/"):
            start, end = fields[0].split(b"-")
            mapping = int(start, 16), int(end, 16)
        elif len(fields) > 4 and b"-" in fields[0]:
            mapping = None
        elif mapping is not None and fields[0] == b"Anonymous:" and fields[1] == b"0":
            found.append(mapping)
    return found


def _lines(path: str) -> Iterator[bytes]:
    """The lines of a file, in pieces: the whole would need more memory than this saves."""
    fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        rest = b""
        while chunk := posix.read(fd, 4096):
            *whole, rest = (rest + chunk).split(b"\n")
            yield from whole
    finally:
        posix.close(fd)


def _hear_of_children() -> int:
    """Block all signals but SIGCHLD; returns a descriptor that is readable after each."""
    signals = _signals()
    reading, writing = posix.pipe2(posix.O_CLOEXEC | posix.O_NONBLOCK)
    signals.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signals.signal(_SIGCHLD, lambda _number, _frame: None)
    signals.pthread_sigmask(signals.SIG_SETMASK, set(signals.valid_signals()) - {_SIGCHLD})
    return int(reading)


def _let_go_of_the_rest(kept: set[int]) -> None:
    """Close what the agent had inherited and is none of ours; 0 and 1 are /dev/null, 2 stays for a last word."""
    # By name: where the kernel has no close_range(2), `closerange` tries every number there could be.
    for fd in map(int, posix.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept:
            try:  # noqa: SIM105 - contextlib is not built in
                posix.close(fd)
            except OSError:  # the one by which they were listed
                pass
    for target in (0, 1, 2):
        if target == 2 and _is_open(2):
            continue
        null = posix.open("/dev/null", posix.O_RDWR)
        if null != target:
            posix.dup2(null, target, inheritable=False)
            posix.close(null)


def _is_open(fd: int) -> bool:
    try:
        posix.fstat(fd)
    except OSError:
        return False
    return True


def _keep(guardian: int) -> None:
    """Be the keeper: wait for the guardian's end, leave nothing of what it left, and end as it did."""
    family = Family(_hear_of_children())
    family.started.add(guardian)
    poller = select.poll()
    poller.register(family.wake, select.POLLIN)
    family.reap()
    while guardian not in family.exits:
        poller.poll()
        family.reap()
    code = family.exits[guardian]
    family.end(_LAST_PATIENCE if code else 0.0)  # one that ended well has waited itself
    if code == -_SIGKILL:
        posix.kill(posix.getpid(), _SIGKILL)
    posix._exit(code if code >= 0 else 128 - code)


def main(arguments: list[str]) -> None:
    """Be the keeper, and by a fork the guardian, of the process whose connection and pidfd have these numbers."""
    link_fd, agent = map(int, arguments[:2])
    posix.setsid()
    _let_go_of_the_rest({link_fd, agent})
    _become_subreaper()
    guardian = posix.fork()
    if guardian:
        posix.close(link_fd)
        posix.close(agent)
        _keep(guardian)
    _become_subreaper()  # that is not inherited
    for fd in (link_fd, agent):
        posix.set_inheritable(fd, False)
    family = Family(_hear_of_children())
    link = socket(fileno=link_fd)
    link.setblocking(False)
    Guardian(link, agent, family).run()
    posix._exit(0)
