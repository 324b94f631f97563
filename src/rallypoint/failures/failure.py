"""One failed worker, with all that its node knows about it (contract sections 6.2 and 7.1).

This includes the error file in which the worker left its exception, its exit code or signal, and why it failed as far
as this machine shows: above all whether the kernel's out-of-memory killer ended it, according to its control group's
counters and the kernel's log.

Laws:

1. Reading an error file never fails: a truncated or invalid one counts as absent, but its text is saved for the report.
   The worker chose what is at the path, so only a regular file is read, at most `MAX_SIZE` bytes of it, and its numbers
   and texts are checked. Writing follows no symbolic link.
2. The counters show how many processes were killed, not which ones, and a worker's children are in its group too. So
   nothing is certain unless the kernel's log is readable and names the worker.
3. If the kernel shows nothing (no /proc, no control groups), nothing is claimed, and nothing raises.

Control groups v1 count kills in the group itself in `memory.oom_control`; v2 count kills in and below the group in
`memory.events`. Without either, the whole machine's counter is used.
"""

from __future__ import annotations

import math
import os
import re
import signal
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial

from rallypoint.base.light_dataclasses import dataclass, field
from rallypoint.base.light_typing import NamedTuple, TypeAlias
from rallypoint.base.log import get_logger
from rallypoint.base.private_files import replace_file
from rallypoint.base.procfs import read_text
from rallypoint.base.signals import signal_name

log = get_logger(__name__)

NO_FILE = "<N/A>"
_HOW_TO_TRACE = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
JsonObject: TypeAlias = dict[str, object]

MAX_SIZE = 4 * 1024 * 1024
"""Maximum bytes of an error file to read; a traceback has some thousand."""
_MAX_RAW = 4096
_LATEST = 253402214400.0
"""Epoch seconds when the last day of the year 9999 begins, which every time zone can show."""
_OOM_KILLED = "killed by the kernel's out-of-memory killer"
_KILLS = "oom_kill"
_KILLED = rb"Killed process (\d+) .*?anon-rss:(\d+)kB, file-rss:\d+kB, shmem-rss:(\d+)kB"
_FIRST_NAMESPACE = 0xEFFFFFFC
"""Inode of the first pid namespace, whose pids are in the kernel's log."""
_NO_LIMIT = 1 << 60
"""Control groups v1 show a number near 2**63 if there is no limit."""


@dataclass
class ProcessFailure:
    """A worker's failure. Its error file is read here, once.

    Args:
        local_rank: the worker's rank on this node.
        pid: its process.
        exitcode: 0 to 255, or -N for death by signal N.
        error_file: the path of its error file; changed to `<N/A>` if no readable file exists.
        last_lines: the end of its standard error, as bytes.
        last_stdout: the end of its standard output, as bytes.
        log: the file with all of its standard error; empty without one.
        stdout: the file with all of its standard output; empty for the console, `/dev/null` if it was hidden.
        program: the program that the worker ran; empty for a function.
        noticed_at: when the failure was noticed, in epoch seconds with fractions.

    `error_file_data`, `message` and `timestamp` (whole epoch seconds) are the contract's. `callstack` is the traceback
    from the error file or empty, `damaged` the text of an unreadable one, `reason` a better explanation (see
    `set_reason`), `context` other findings that might be related, such as a full disk. `moment` is the best estimate of
    when the worker failed, with fractions: it orders failures within one node.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    last_lines: bytes = field(default=b"", kw_only=True, repr=False)
    last_stdout: bytes = field(default=b"", kw_only=True, repr=False)
    log: str = field(default="", kw_only=True, repr=False)
    stdout: str = field(default="", kw_only=True, repr=False)
    program: str = field(default="", kw_only=True, repr=False)
    noticed_at: float = field(default_factory=time.time, kw_only=True)
    error_file_data: JsonObject = field(init=False, repr=False)
    message: str | JsonObject = field(init=False)
    timestamp: int = field(init=False)
    moment: float = field(init=False)
    callstack: str = field(init=False, default="", repr=False)
    damaged: str = field(init=False, default="", repr=False)
    context: str = field(init=False, default="", repr=False)
    reason: str = field(init=False, default="", repr=False)

    def __post_init__(self) -> None:
        self.look_closer: Callable[[], str | None] | None = None
        """Finds a better explanation if that takes only milliseconds; see `settle`."""
        self.remark = ""
        """Text to add after the message in parentheses, such as that the worker has not ended; then `exitcode` is the
        code with which Python would end it."""
        reply = read_error_file(self.error_file)
        if isinstance(reply, ErrorFile):
            self.error_file_data = reply.data
            self.message = reply.message
            self.callstack = reply.callstack
            self.timestamp = reply.timestamp
            otherwise = refine_timestamp(reply.timestamp, self.noticed_at)
            self.moment = otherwise if reply.exact is None else reply.exact
            return
        if isinstance(reply, UnreadableErrorFile):
            self.damaged = f"the error file {reply.path} is damaged; it begins with {reply.raw!r}"
        self.context = _disk_full(os.path.dirname(self.error_file))
        self.error_file = NO_FILE
        self.error_file_data = {"message": "<NONE>"}
        self.timestamp = int(self.noticed_at)
        self.moment = self.noticed_at
        if self.exitcode < 0:
            self.message = f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}"
        else:
            self.error_file_data["errorTraits"] = {"category": "system_terminated_error", "retryability": "False"}
            self.message = _HOW_TO_TRACE

    def set_reason(self, reason: str) -> None:
        """Use this explanation as the message, unless it is empty."""
        if reason:
            self.reason = self.message = reason
            self.look_closer = None

    def settle(self) -> str:
        """Investigate further if possible. Call this after the announcement, which it would delay.

        Returns the new explanation; empty if unchanged.
        """
        look, self.look_closer = self.look_closer, None
        before = self.reason, self.context
        self.set_reason((look() if look is not None else None) or "")
        if self.reason != before[0]:
            return self.text
        return self.context if self.context != before[1] else ""

    @property
    def text(self) -> str:
        """The message as one text, whatever the error file's format."""
        if isinstance(self.message, str):
            return self.message
        return str(self.message.get("message", self.message))

    def signal_name(self) -> str:
        """`SIGKILL` and the like; `<N/A>` if no signal ended the worker."""
        return signal_name(-self.exitcode) if self.exitcode < 0 else NO_FILE

    def timestamp_isoformat(self) -> str:
        """`YYYY-MM-DD_HH:MM:SS` in local time."""
        return iso_time(self.timestamp)


def iso_time(timestamp: float) -> str:
    """`YYYY-MM-DD_HH:MM:SS` in local time, from epoch seconds."""
    return time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(timestamp))


def _disk_full(folder: str) -> str:
    """Return a sentence if the disk is full below a folder, which contains the worker's output and error file."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return ""
    full = disk.f_bavail == 0 or disk.f_favail == 0 < disk.f_files
    return f"the disk is full under {folder}: its last output might be missing there" if full else ""


# Error files


class ErrorFile(NamedTuple):
    """An error file's contents: `data` is the parsed file, `message` its `message` member (a text in newer files).

    `text` and `callstack` are that message and the formatted traceback as texts. `timestamp` is in whole epoch seconds,
    `exact` the same with a fraction if the time of the file itself gives one, else None.
    """

    path: str
    data: JsonObject
    message: str | JsonObject
    text: str
    callstack: str
    timestamp: int
    exact: float | None


class UnreadableErrorFile(NamedTuple):
    """A file that is not an error file, with the start of its text."""

    path: str
    raw: str


def read_error_file(path: str) -> ErrorFile | UnreadableErrorFile | None:
    """Read an error file; None if it does not exist, or if the file or `path` is empty."""
    if not path or path == os.devnull:
        return None
    try:
        # O_NONBLOCK: a named pipe without a writer would block the agent forever.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            return None
        if not stat.S_ISREG(status.st_mode):
            return UnreadableErrorFile(
                path, f"(nothing: it is {_KINDS.get(stat.S_IFMT(status.st_mode), 'not a regular file')})"
            )
        with open(fd, "rb", closefd=False) as file:
            data = file.read(MAX_SIZE + 1)
    except OSError:
        return None
    finally:
        os.close(fd)
    raw = data[:MAX_SIZE].decode(errors="replace")
    if not raw.strip():
        return None
    whole = len(data) <= MAX_SIZE
    written = min(max(status.st_mtime, 0.0), _LATEST)
    return (_parse(path, raw, written) if whole else None) or UnreadableErrorFile(path, raw[:_MAX_RAW])


_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def write_error_file(path: str, data: JsonObject) -> None:
    """Write an error file atomically. Logs a failure."""
    import json

    try:
        replace_file(path, json.dumps(data).encode(), mode=0o666)
    except OSError as error:
        log.warning("the error file %r cannot be written: %s", path, error)


def error_data(text: str, callstack: str, timestamp: float) -> JsonObject:
    """The contents of an error file; `text` is `<exception class>: <its text>`, `timestamp` epoch seconds."""
    extra: JsonObject = {"py_callstack": callstack, "timestamp": str(int(timestamp))}
    return {"message": {"message": text, "extraInfo": extra}}


def _parse(path: str, raw: str, written: float) -> ErrorFile | None:
    import json

    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    match data.get("message"):
        case str(text):
            timestamp = _timestamp_seconds(data.get("timestamp"), written)
            return ErrorFile(path, data, text, text, "", timestamp, _exact_time(timestamp, written))
        case dict(message):
            extra = message.get("extraInfo")
            known = extra if isinstance(extra, dict) else {}
            text = str(message.get("message", ""))
            callstack = str(known.get("py_callstack") or "")
            timestamp = _timestamp_seconds(known.get("timestamp"), written)
            return ErrorFile(path, data, message, text, callstack, timestamp, _exact_time(timestamp, written))
        case _:
            return None


def _timestamp_seconds(value: object, otherwise: float) -> int:
    """The file's timestamp, from a number or its text; otherwise the time of its last change."""
    if isinstance(value, str | int | float):
        with suppress(ValueError, OverflowError):  # not a number
            seconds = float(value)
            if math.isfinite(seconds) and 0 <= seconds < _LATEST:  # and not, for example, nanoseconds
                return int(seconds)
    return int(otherwise)


def _exact_time(timestamp: int, written: float) -> float | None:
    """Add the fraction of the second from the file's own time: it is written right after the exception was caught.

    Only if the times are close: the time of a copied file, or of a file on another machine's disk, means nothing.
    """
    return refine_timestamp(timestamp, written) if timestamp <= written < timestamp + 2 else None


def refine_timestamp(timestamp: int, moment: float) -> float:
    """The time nearest to `moment` within the second that begins at `timestamp`; both in epoch seconds."""
    return min(max(moment, float(timestamp)), timestamp + 0.999999)


# Signals


class OomKills:
    """Counts kills by the out-of-memory killer in this process's control group from now on; `proc` and `mounted` are
    mount points.

    Creating an `OomKills` reads two small files.
    """

    def __init__(self, proc: str = "/proc", mounted: str = "/sys/fs/cgroup") -> None:
        self._vmstat = f"{proc}/vmstat"
        self._group = _own_cgroup(proc, mounted)
        self._before = self._count()

    def reason(self, pid: int, killed: int) -> str:
        """Why a worker that died of SIGKILL was killed, according to the counters; empty if this killer is unlikely.

        Args:
            pid: the worker's pid.
            killed: how many workers died of a SIGKILL that was not ours since this object was created.
        """
        before, now = self._before, self._count()
        if now <= before:
            return ""
        sure = self._group is not None and now - before >= killed
        return f"{'most likely' if sure else 'perhaps'} {_OOM_KILLED} ({self._facts(before, now)})"

    def reason_by_log(self, pid: int) -> str | None:
        """Like `reason`, from the kernel's log, which takes milliseconds to read; None if the log does not say."""
        victims = killed_for_memory()
        if victims is None:
            return None
        facts = self._facts(self._before, self._count())
        if pid in victims:
            return f"{_OOM_KILLED} (it held {megabytes(victims[pid])}, {facts})"
        return (
            f"killed by an unknown sender after another process was {_OOM_KILLED} ({facts})"
            if self._group is not None
            else ""
        )

    def context(self, killed: int) -> str:
        """A sentence on a worker that ended otherwise, if others in its group were killed (`killed`: see `reason`)."""
        count = self._count() - self._before
        if self._group is None or count <= 0:
            return ""
        who = "another rank" if count <= killed else "another process, most likely a child of a rank"
        return f"since it was started, the kernel's out-of-memory killer has killed {who} ({self._where()})"

    def child_by_log(self, words: bytes) -> str:
        """Like `context`, from the kernel's log, if a worker's last words contain a victim's pid; else empty."""
        victims = killed_for_memory() or {}
        child = next((pid for pid in victims if re.search(rb"\b%d\b" % pid, words)), None)
        if child is None:
            return ""
        held = f"pid {child}, it held {megabytes(victims[child])}"
        return f"the kernel's out-of-memory killer has killed a child of this rank ({held}, {self._where()})"

    def _where(self) -> str:
        return "" if self._group is None else f"control group {self._group.name}, {self._group.limit()}"

    def _facts(self, before: int, now: int) -> str:
        if self._group is None:
            return f"the machine's oom_kill rose from {before} to {now}"
        return f"control group {self._group.name}: oom_kill rose from {before} to {now}, {self._group.limit()}"

    def _count(self) -> int:
        return _number(self._vmstat if self._group is None else self._group.counter, _KILLS) or 0


class _Cgroup:
    """A control group: its path among the groups, its folder, the mount point, and whether it is version 2."""

    def __init__(self, name: str, folder: str, top: str, second: bool) -> None:
        self.name = name
        self._folder = folder
        self._top = top
        self._second = second
        self.counter = f"{folder}/memory.events" if second else f"{folder}/memory.oom_control"

    def limit(self) -> str:
        limits = [limit for limit in self._limits() if limit < _NO_LIMIT]
        return f"limit {megabytes(min(limits))}" if limits else "no limit but the machine's memory"

    def _limits(self) -> Iterator[int]:
        if not self._second:
            yield _number(f"{self._folder}/memory.stat", "hierarchical_memory_limit") or _NO_LIMIT
            return
        folder = self._folder
        while len(folder) >= len(self._top):
            text = read_text(f"{folder}/memory.max").strip()
            yield int(text) if text.isdigit() else _NO_LIMIT
            folder = os.path.dirname(folder)


def megabytes(count: int) -> str:
    """Format a number of bytes for people."""
    return f"{count / (1 << 20):.0f} MB"


@cache
def _own_cgroup(proc: str, mounted: str) -> _Cgroup | None:
    """The control group that counts this process's memory, if its counter is readable; a process stays in its group."""
    name, second = own_cgroup_path("memory", proc)
    top = mounted if second else f"{mounted}/memory"
    # A container sees its own group at the top, and might see its outside name.
    for folder in (top + name.rstrip("/"), top) if name else ():
        group = _Cgroup(name, folder, top, second)
        if _number(group.counter, _KILLS) is not None:
            return group
    return None


def own_cgroup_path(controller: str, proc: str = "/proc") -> tuple[str, bool]:
    """Path of this process's control group, empty if unknown, and whether it is v2."""
    name = ""
    for line in read_text(f"{proc}/self/cgroup").split("\n"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            return path, False
        if number == "0":
            name = path
    return name, True


def _number(path: str, key: str) -> int | None:
    """The number after a key in a file with one `key number` per line."""
    for line in read_text(path).split("\n"):
        name, _, value = line.partition(" ")
        if name == key and value.isdigit():
            return int(value)
    return None


def killed_for_memory(log: str = "/dev/kmsg", namespace: str = "/proc/self/ns/pid") -> dict[int, int] | None:
    """Killed processes in the log, as pid to bytes used; None if the log cannot be read, or contains other pids."""
    try:
        if os.stat(namespace).st_ino != _FIRST_NAMESPACE:
            return None
        matches = re.findall(_KILLED, b"".join(raw_entries(log)))
    except OSError:
        return None
    return {int(pid): (int(own) + int(shared)) * 1024 for pid, own, shared in matches}


SHARED_MEMORY = "/dev/shm"
_FULL = 0.05
"""Free share of shared memory below which it counts as full: allocations there are large."""


def explain_signal(failure: ProcessFailure, kills: OomKills | None = None, killed: int = 1) -> None:
    """Set the reason of a death by signal, if known; otherwise add related findings to its context.

    Only the failure's `settle` reads the kernel's log.

    Args:
        failure: the worker's failure; the exception in an error file is not overridden.
        kills: counts kills by the out-of-memory killer since the worker's start.
        killed: how many workers died since then of a SIGKILL that was not ours.
    """
    if failure.exitcode != -signal.SIGKILL and kills is not None and (context := kills.context(killed)):
        failure.look_closer = partial(_child_by_kernel_log, failure, kills, context)
        failure.context = "\n".join(filter(None, (failure.context, context)))
    if failure.error_file != NO_FILE:
        return
    why, text = "", failure.text
    if failure.exitcode == -signal.SIGKILL and kills is not None:
        why = kills.reason(failure.pid, killed)
    elif failure.exitcode == -signal.SIGBUS:
        why = bus_error(SHARED_MEMORY)
    if why:
        failure.set_reason(f"{text}: {why}")
        if kills is not None and failure.exitcode == -signal.SIGKILL:
            failure.look_closer = partial(_by_kernel_log, text, kills, failure.pid)


def _child_by_kernel_log(failure: ProcessFailure, kills: OomKills, context: str) -> None:
    words = b"\n".join((failure.text.encode(errors="replace"), failure.last_lines, failure.last_stdout))
    if child := kills.child_by_log(words):
        failure.context = failure.context.replace(context, child)


def _by_kernel_log(text: str, kills: OomKills, pid: int) -> str | None:
    why = kills.reason_by_log(pid)
    return f"{text}: {why}" if why else why if why is None else text


def bus_error(shared: str) -> str:
    """The likely cause of a SIGBUS; `shared` is the folder of shared memory."""
    meaning = "it accessed mapped memory with nothing behind it, such as a mapped file that was truncated"
    try:
        disk = os.statvfs(shared)
    except OSError:
        return meaning
    total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    if not total:  # not a separate file system
        return meaning
    figures = f"{megabytes(free)} of {megabytes(total)} free"
    if free < total * _FULL:
        remedy = "make it larger (`--shm-size` for a container), or use less of it"
        return f"{shared} is nearly full ({figures}); {remedy}"
    return f"{meaning}, or shared memory ran out ({shared}: {figures} now)"


KERNEL_LOG = "/dev/kmsg"


class LogEntry(NamedTuple):
    """One entry: its time, in seconds on this machine's monotonic clock, and its text."""

    moment: float
    text: str


def raw_entries(path: str = KERNEL_LOG) -> list[bytes]:
    """Read all entries unchanged, oldest first. Raises OSError if the log may not be read."""
    entries: list[bytes] = []
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while True:
            try:
                entry = os.read(fd, 8192)  # one entry
            except BrokenPipeError:  # the entry was overwritten
                continue
            if not entry:
                break
            entries.append(entry)
    except BlockingIOError:
        pass
    finally:
        os.close(fd)
    return entries


def log_entries(entries: Iterable[bytes]) -> list[LogEntry]:
    """Parse entries, dropping priority and properties: `6,1234,5678901,-;text`; the third field is microseconds."""
    parsed = []
    for entry in entries:
        head, _, text = entry.decode(errors="replace").partition(";")
        fields = head.split(",")
        moment = int(fields[2]) / 1e6 if len(fields) > 2 and fields[2].isdigit() else 0.0
        parsed.append(LogEntry(moment, text.partition("\n")[0]))
    return parsed
