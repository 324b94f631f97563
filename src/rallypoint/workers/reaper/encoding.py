"""Encodes the settings that a worker starts with, for requests to the reaper and to forking processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Mapping, Sequence

from rallypoint.base.errors import UserError
from rallypoint.base.procfs import inherited_settings
from rallypoint.workers.reaper import protocol

Settings = tuple[list[int], list[int], list[int], int, list[int]]
"""Places of 0, 1 and 2 among the descriptors sent, ignored signals, mask, umask, processors; see `protocol`."""


def worker_settings(
    places: list[int], cpus: Collection[int], blocked: Collection[int] = (), ignored: Collection[int] = ()
) -> Settings:
    """The settings that a worker inherits from this process at this moment, and those set explicitly.

    Args:
        places: see `standard_descriptors`.
        cpus: the processors that it may run on; empty for all that we may use.
        blocked: signals that it blocks initially, in addition to those that we block.
        ignored: signals that it ignores initially, in addition to those that we ignore.
    """
    ours = inherited_settings()
    mask = sorted({*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())), *map(int, blocked)})
    return places, sorted({*ours.ignored, *map(int, ignored)}), mask, ours.umask, sorted(cpus)


def standard_descriptors(*given: int | None) -> tuple[list[int], list[int]]:
    """Descriptors to send for 0, 1 and 2 of a worker, and for each of the three its position among them.

    Args:
        given: the descriptors; None for ours, if a child of ours would inherit it.
    """
    sent: list[int] = []
    places = []
    for default, fd in enumerate(given):
        there = fd is not None or _is_inherited(default)
        places.append(len(sent) if there else protocol.CLOSED)
        sent += [default if fd is None else fd] * there
    return sent, places


def _is_inherited(fd: int) -> bool:
    """Whether all our children inherit this descriptor. One that we have opened in place of a closed one is not."""
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


def encoded_arguments(argv: Sequence[str]) -> list[bytes]:
    """Arguments as the kernel takes them. Raises UserError for a NUL byte."""
    return [_checked(os.fsencode(each)) for each in argv]


def encoded_environment(env: Mapping[str, str]) -> dict[bytes, bytes]:
    """Variables as the kernel takes them. Raises UserError for a NUL byte, or an invalid name."""
    for name in env:
        if "=" in name:
            raise UserError(f"{name!r} holds a '=', which no variable name can; take it out")
    return {_checked(os.fsencode(name)): _checked(os.fsencode(value)) for name, value in env.items()}


def _checked(data: bytes) -> bytes:
    if b"\0" in data:
        raise UserError(f"{os.fsdecode(data)!r} holds a null byte, which no program can be given; take it out")
    return data


def executable_candidates(name: str, env: Mapping[str, str]) -> list[bytes]:
    """The files that a program's name can mean, in the order of the PATH of `env`."""
    found = [name] if os.path.dirname(name) else [os.path.join(folder, name) for folder in os.get_exec_path(env)]
    return [os.fsencode(each) for each in found]


def above_standard(fd: int) -> int:
    """Move this descriptor to a number above 2."""
    if fd > 2:
        return fd
    import fcntl

    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)
