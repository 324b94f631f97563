"""Why a worker failed, beyond its exit code or signal, as far as this machine shows it: above all whether the kernel's
out-of-memory killer ended it, by the counters of its control group and the kernel's log.

Laws:

1. The counters tell how many processes were killed, and not which, and a worker's children are in its group too. So
   nothing is certain unless the kernel's log, where it may be read, names the worker.
2. Where the kernel shows nothing (no /proc, no control groups), nothing is claimed, and nothing raises.

The first version of control groups counts in `memory.oom_control` what happens in the group itself, the second in
`memory.events` what happens in it and below it. Without either there is the counter of the whole machine.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from rallypoint.base.light_typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rallypoint.failures.failure import ProcessFailure


_OOM_KILLED = "killed by the kernel's out-of-memory killer"
_KILLS = b"oom_kill"
_KILLED = rb"Killed process (\d+) .*?anon-rss:(\d+)kB, file-rss:\d+kB, shmem-rss:(\d+)kB"
_FIRST_NAMESPACE = 0xEFFFFFFC
"""Inode of the first pid namespace, whose pids are in the kernel's log."""
_NO_LIMIT = 1 << 60
"""The first version shows some number near 2**63 if there is none."""


class OomKills:
    """Kills by the out-of-memory killer in this process's control group, from now on; `proc` and `mounted` are mount
    points.

    Creating one reads two small files.
    """

    def __init__(self, proc: str = "/proc", mounted: str = "/sys/fs/cgroup") -> None:
        self._vmstat = f"{proc}/vmstat"
        self._group = _own_cgroup(proc, mounted)
        self._before = self._count()

    def reason(self, pid: int, killed: int) -> str:
        """Why a worker that died of SIGKILL was killed, by the counters; empty if this killer is not a likely cause.

        `killed` workers have died of a SIGKILL that was not ours since this object was made.
        """
        before, now = self._before, self._count()
        if now <= before:
            return ""
        sure = self._group is not None and now - before >= killed
        return f"{'most likely' if sure else 'perhaps'} {_OOM_KILLED} ({self._facts(before, now)})"

    def reason_by_log(self, pid: int) -> str | None:
        """The same by the kernel's log, which takes milliseconds to read; None if it does not tell."""
        victims = killed_for_memory()
        if victims is None:
            return None
        facts = self._facts(self._before, self._count())
        if pid in victims:
            return f"{_OOM_KILLED} (it held {megabytes(victims[pid])}, {facts})"
        return (
            f"killed by somebody, after another process was {_OOM_KILLED} ({facts})" if self._group is not None else ""
        )

    def context(self) -> str:
        """A sentence for a worker that ended otherwise, if others of its group were killed, such as its children."""
        if self._group is None or self._count() <= self._before:
            return ""
        where = f"control group {self._group.name}, {self._group.limit()}"
        return f"since it was started, the kernel's out-of-memory killer has killed other processes ({where})"

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
            yield _number(f"{self._folder}/memory.stat", b"hierarchical_memory_limit") or _NO_LIMIT
            return
        folder = self._folder
        while len(folder) >= len(self._top):
            text = _read(f"{folder}/memory.max").strip()
            yield int(text) if text.isdigit() else _NO_LIMIT
            folder = os.path.dirname(folder)


def megabytes(count: int) -> str:
    return f"{count / (1 << 20):.0f} MB"


def _own_cgroup(proc: str, mounted: str) -> _Cgroup | None:
    """The control group of this process that counts memory, if its counter can be read."""
    name, second = own_cgroup_path(b"memory", proc)
    top = mounted if second else f"{mounted}/memory"
    # A container sees its own group at the top, and may see the name that it has outside.
    for folder in (top + name.rstrip("/"), top) if name else ():
        group = _Cgroup(name, folder, top, second)
        if _number(group.counter, _KILLS) is not None:
            return group
    return None


def own_cgroup_path(controller: bytes, proc: str = "/proc") -> tuple[str, bool]:
    """The path of this process's control group, and whether it is of the second version; empty if it is unknown."""
    name = b""
    for line in _read(f"{proc}/self/cgroup").split(b"\n"):
        number, _, rest = line.partition(b":")
        controllers, _, path = rest.partition(b":")
        if controller in controllers.split(b","):
            return os.fsdecode(path), False
        if number == b"0":
            name = path
    return os.fsdecode(name), True


def _number(path: str, key: bytes) -> int | None:
    """The number of a key in a file of such lines."""
    for line in _read(path).split(b"\n"):
        name, _, value = line.partition(b" ")
        if name == key and value.isdigit():
            return int(value)
    return None


def _read(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return b"".join(iter(lambda: os.read(fd, 1 << 16), b""))
    except OSError:
        return b""
    finally:
        os.close(fd)


def killed_for_memory(log: str = "/dev/kmsg", namespace: str = "/proc/self/ns/pid") -> dict[int, int] | None:
    """The killed processes in the log: pid to bytes used; None if the log cannot be read, or has other pids."""
    try:
        if os.stat(namespace).st_ino != _FIRST_NAMESPACE:
            return None
        found = re.findall(_KILLED, b"".join(raw_entries(log)))
    except OSError:
        return None
    return {int(pid): (int(own) + int(shared)) * 1024 for pid, own, shared in found}


SHARED_MEMORY = "/dev/shm"
_FULL = 0.05
"""The free part of shared memory below which it counts as full: allocations there are large."""


def explain_signal(failure: ProcessFailure, kills: OomKills | None = None, killed: int = 1) -> None:
    """Set the reason of a failure by a signal, if it is known; else add what may be related to its context.

    `killed` workers have died of a SIGKILL that was not ours. The exception in an error file is not overridden, and
    the kernel's log is only read by the failure's `settle`.
    """
    if failure.exitcode != -signal.SIGKILL and kills is not None:
        failure.context = "\n".join(filter(None, (failure.context, kills.context())))
    from rallypoint.failures.failure import NO_FILE

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


def _by_kernel_log(text: str, kills: OomKills, pid: int) -> str | None:
    why = kills.reason_by_log(pid)
    return f"{text}: {why}" if why else why if why is None else text


def bus_error(shared: str) -> str:
    """The likely cause of a SIGBUS; `shared` is the folder of shared memory."""
    meaning = "it accessed mapped memory with nothing behind it, as of a mapped file that was truncated"
    try:
        disk = os.statvfs(shared)
    except OSError:
        return meaning
    total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    if not total:  # not a file system of its own
        return meaning
    figures = f"{megabytes(free)} of {megabytes(total)} free"
    if free < total * _FULL:
        remedy = "make it larger (`--shm-size` of a container), or use less of it"
        return f"{shared} is nearly full ({figures}); {remedy}"
    return f"{meaning}, or shared memory ran out ({shared}: {figures} now)"


KERNEL_LOG = "/dev/kmsg"


class LogEntry(NamedTuple):
    moment: float
    text: str


def raw_entries(path: str = KERNEL_LOG) -> list[bytes]:
    """All entries as they are, the oldest first. OSError if it may not be read."""
    entries: list[bytes] = []
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while True:
            try:
                entry = os.read(fd, 8192)  # one entry
            except BrokenPipeError:  # it was overwritten meanwhile
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
    """The entries without priorities and properties: `6,1234,5678901,-;text`, with microseconds in the third place."""
    found = []
    for entry in entries:
        head, _, text = entry.decode(errors="replace").partition(";")
        fields = head.split(",")
        moment = int(fields[2]) / 1e6 if len(fields) > 2 and fields[2].isdigit() else 0.0
        found.append(LogEntry(moment, text.partition("\n")[0]))
    return found
