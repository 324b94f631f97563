"""A wrapped program, as far as the kernel shows it: which process it is, and how it ended.

A wrapper that calls `exec` becomes the program: the process stays the same. Other wrappers start it as a child, or one
of their children does. The program is the process that runs the worker's command line, with which the wrapper's command
line ends:

    rallyrun --wrap='gdb -batch -ex run --args'
    101  gdb -batch -ex run --args python -u train.py     ends with the whole command: the wrapper
    102  sh -c 'exec python -u train.py'                  one word: no match
    102  /usr/bin/python3.11 -u train.py                  the program
    110  /usr/bin/python3.11 -u train.py                  below it: a data loader

The kernel reports how it ended only to its parent, the wrapper. Since Linux 6.15 a pidfd shows it too; before that,
only the process table does, until the wrapper reaps the program.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from fcntl import ioctl
from typing import NamedTuple

from rallypoint.base.process_table import process_table

_INFO = struct.Struct("=QQIII8Ii")
"""`struct pidfd_info` of <linux/pidfd.h>, version 0: the mask comes first, the exit status last."""
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
"""PIDFD_GET_INFO."""
_EXIT = 1 << 3
"""PIDFD_INFO_EXIT."""
_STATUS_FIELD = 49
"""Field of /proc/PID/stat, counted from the state."""
_MOST_PROCESSES = 1000


class ProgramName(NamedTuple):
    """A program's command line, as /proc might show it.

    `names` are its file's names: /proc might show an interpreter by another name than the command used. `interpreters`
    are those in a script's first line: the script runs as `/bin/bash ./train.sh`.
    """

    words: Sequence[str]
    names: frozenset[str]
    interpreters: frozenset[str]

    @classmethod
    def of(cls, words: Sequence[str]) -> ProgramName:
        """Create the name of the program that these words start."""
        path = shutil.which(words[0]) or words[0]
        return cls(words, frozenset(map(os.path.basename, (words[0], os.path.realpath(path)))), _interpreters(path))

    def ends(self, command: Sequence[str]) -> bool:
        """Whether a command line ends with this one."""
        count = len(self.words)
        return (
            len(command) >= count
            and os.path.basename(command[-count]) in self.names
            and list(command[len(command) - count + 1 :]) == list(self.words[1:])
        )

    def fits(self, command: Sequence[str]) -> bool:
        """Whether a command line equals this one."""
        return self.ends(command) and (
            len(command) == len(self.words) or os.path.basename(command[0]) in self.interpreters
        )


def _interpreters(path: str) -> frozenset[str]:
    """Names of the interpreters that run a script; none if the file is no script."""
    try:
        with open(path, "rb") as file:
            first = file.readline(256)
    except OSError:
        return frozenset()
    return (
        frozenset(os.path.basename(os.fsdecode(word)) for word in first[2:].split())
        if first[:2] == b"#!"
        else frozenset()
    )


def find_program(
    root: int, program: ProgramName, wrapper: ProgramName, accepts: Callable[[int], bool] = lambda _pid: True
) -> int | None:
    """Find the pid of `wrapper`'s program: the process `root` or one below it; None if not found.

    Args:
        root: where the search starts.
        program: what the wrapper runs.
        wrapper: what was started.
        accepts: whether the process with a pid can be the program.
    """
    level, count = [root], 0
    while level and count < _MOST_PROCESSES:  # take the nearest: the program's data loaders have the same command line
        count += len(level)
        for pid in level:
            words = command_line(pid)
            if program.fits(words) and not wrapper.ends(words) and accepts(pid):
                return pid
        level = [child for pid in level for child in children(pid)]
    return None


def command_line(pid: int) -> list[str]:
    """Words of a process's command line; none if it ended."""
    return _words(f"/proc/{pid}/cmdline")


def environment(pid: int) -> dict[str, str]:
    """Variables with which a process's program was started; none if reading them is not permitted."""
    return {name: value for name, _, value in (word.partition("=") for word in _words(f"/proc/{pid}/environ"))}


def _words(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            return [os.fsdecode(word) for word in file.read().split(b"\0")[:-1]]
    except OSError:
        return []


def children(pid: int) -> list[int]:
    """Children of a process, of all its threads."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    found: list[int] = []
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
        except FileNotFoundError:
            if os.path.exists(f"/proc/{pid}/task/{thread}"):  # this kernel has no such list
                with suppress(OSError):
                    return sorted(stat.pid for stat in process_table().values() if stat.parent == pid)
        except OSError:
            continue
    return found


def exit_code(pid: int, fd: int) -> int | None:
    """The exit code of an ended process, -N for a signal; None if the kernel does not report it.

    Args:
        pid: its pid.
        fd: its pidfd, opened before it was reaped.
    """
    data = bytearray(_INFO.pack(_EXIT, *[0] * 13))
    with suppress(OSError):
        ioctl(fd, _GET_INFO, data)
        mask, *_, status = _INFO.unpack(data)
        if mask & _EXIT:
            return os.waitstatus_to_exitcode(status)
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    shown = len(fields) > _STATUS_FIELD and fields[0] == b"Z" and fields[_STATUS_FIELD] != b"0"
    return os.waitstatus_to_exitcode(int(fields[_STATUS_FIELD])) if shown else None
