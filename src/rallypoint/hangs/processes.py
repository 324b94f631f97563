"""Reads from the kernel the state of a process that may hang, and where in the kernel it waits."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from typing import NamedTuple

from rallypoint.base.log import printable
from rallypoint.base.process_table import read_stat

STATES = {
    "R": "running",
    "S": "sleeping",
    "I": "sleeping",
    "D": "in uninterruptible sleep",
    "T": "stopped by a signal",
    "t": "held by a debugger",
    "Z": "a zombie",
    "X": "ended",
}
"""The names of states, by the letter in /proc/PID/stat."""
GONE = "gone"
_MOST_THREADS = 4096
_MOST_STACK = 32
"""Lines of a kernel stack that are kept."""

_CALLS = {
    "x86_64": "0 read 1 write 7 poll 16 ioctl 23 select 35 nanosleep 42 connect 43 accept 44 sendto 45 recvfrom "
    "46 sendmsg 47 recvmsg 58 vfork 61 wait4 72 fcntl 73 flock 74 fsync 75 fdatasync 202 futex 230 clock_nanosleep "
    "232 epoll_wait 247 waitid 257 openat 262 newfstatat 270 pselect6 271 ppoll 281 epoll_pwait",
    "aarch64": "22 epoll_pwait 25 fcntl 29 ioctl 32 flock 56 openat 63 read 64 write 72 pselect6 73 ppoll "
    "79 newfstatat 82 fsync 83 fdatasync 95 waitid 98 futex 101 nanosleep 115 clock_nanosleep 202 accept 203 connect "
    "206 sendto 207 recvfrom 211 sendmsg 212 recvmsg 260 wait4",
}
"""System calls that programs are often found in, by machine and number."""


class ProcessState(NamedTuple):
    """A process as the kernel shows it. `where` is the place in the kernel at which it waits, empty where that may not
    be read or is none; `kernel` its kernel stack, which is read of one in uninterruptible sleep only."""

    name: str
    where: str = ""
    kernel: tuple[str, ...] = ()


def process_state(pid: int) -> ProcessState:
    """The state of a process: of its main thread, or of one of its threads that is in uninterruptible sleep."""
    stat = read_stat(pid)
    if stat is None:
        return ProcessState(GONE)
    if stat.state == "Z" and not stat.ended:
        return ProcessState("running without its main thread, which has ended")
    if stat.ended:
        return ProcessState(STATES["Z"])
    if stat.state != "D" and (thread := next(_uninterruptible(pid), 0)):
        name = f"{STATES.get(stat.state, stat.state)}, its thread {thread} {STATES['D']}"
        return ProcessState(name, _where(pid, thread), _kernel_stack(pid, thread))
    name = STATES.get(stat.state, printable(stat.state))
    if stat.state in "Tt":
        return ProcessState(name)  # it waits for a signal, whatever it did before
    return ProcessState(name, _where(pid, pid), _kernel_stack(pid, pid) if stat.state == "D" else ())


def _uninterruptible(pid: int) -> Iterator[int]:
    try:
        threads = sorted(map(int, os.listdir(f"/proc/{pid}/task")))[:_MOST_THREADS]
    except (OSError, ValueError):
        return
    for each in threads:
        found = read_stat(each)
        if each != pid and found is not None and found.state == "D":
            yield each


def _where(pid: int, thread: int) -> str:
    place = _read(pid, thread, "wchan").strip("0\n")
    number = _read(pid, thread, "syscall").partition(" ")[0]
    calls = _CALLS.get(platform.machine(), "").split()
    called = dict(zip(calls[::2], calls[1::2], strict=True)).get(number, number)
    names = (place, called if number.isdigit() else "")
    return ", ".join(printable(each) for each in names if each)


def _kernel_stack(pid: int, thread: int) -> tuple[str, ...]:
    lines = (line.rpartition(" ")[2] for line in _read(pid, thread, "stack").splitlines())
    return tuple(printable(each) for each in lines if each)[:_MOST_STACK]


def _read(pid: int, thread: int, name: str) -> str:
    try:
        with open(f"/proc/{pid}/task/{thread}/{name}", "rb") as file:
            return file.read(8192).decode(errors="replace")
    except OSError:
        return ""
