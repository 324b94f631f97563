"""Shared memory, and the file systems of logs and temporary files. A dead network file system may hold up who asks."""

from __future__ import annotations

import os
import tempfile
from typing import NamedTuple

from rallypoint.preflight.results import Judgement, failed, not_known, passed, warned
from rallypoint.preflight.table import Check, CheckInputs, Reading

SHARED_MEMORY = "/dev/shm"

MEBIBYTE, GIBIBYTE = 1 << 20, 1 << 30
MIN_SHARED, ENOUGH_SHARED = 64 * MEBIBYTE, GIBIBYTE
"""Docker gives a container 64 MiB unless told otherwise."""
MIN_SPACE, ENOUGH_SPACE = 64 * MEBIBYTE, GIBIBYTE
MIN_FILES, ENOUGH_FILES = 100, 10_000

_PROBE = 4096


class DiskFacts(NamedTuple):
    """A folder, or the nearest one above it that is there: bytes, and files that can still be made (-1: not counted).

    `trouble` is why nothing can be written there; empty if something was, and taken away again.
    """

    folder: str
    total: int = 0
    free: int = 0
    files: int = -1
    trouble: str = ""


def read_shared_memory(_inputs: CheckInputs) -> DiskFacts:
    """Look at /dev/shm."""
    return disk_facts(SHARED_MEMORY)


def read_temp_dir(_inputs: CheckInputs) -> DiskFacts:
    """Look at the temporary folder that is wanted. (`tempfile` silently takes another if this one cannot be used.)"""
    return disk_facts(next(filter(None, map(os.environ.get, ("TMPDIR", "TEMP", "TMP"))), "/tmp"))


def read_log_dir(inputs: CheckInputs) -> DiskFacts | None:
    """Look at the log folder, if there is one."""
    return disk_facts(_nearest(inputs.log_dir)) if inputs.log_dir not in ("", os.devnull) else None


def disk_facts(folder: str) -> DiskFacts:
    """How much room a folder has, and whether a file can be made there; the file has no name and ends at once."""
    try:
        disk = os.statvfs(folder)
    except OSError as error:
        return DiskFacts(folder, trouble=error.strerror or str(error))
    files = disk.f_favail if disk.f_files else -1
    trouble = ""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(_PROBE))
    except OSError as error:
        trouble = error.strerror or str(error)
    return DiskFacts(folder, disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize, files, trouble)


def judge_shared_memory(facts: DiskFacts) -> Judgement:
    """NCCL and data loaders put large buffers there, and die of a bus error where it is full."""
    larger = "make it larger: --shm-size of a container, an emptyDir of medium Memory at /dev/shm in Kubernetes"
    if facts.trouble:
        return failed(f"{facts.folder} cannot be written to ({facts.trouble})", larger)
    text = f"{facts.folder} has {size(facts.free)} of {size(facts.total)} free"
    remedy = larger if facts.total < ENOUGH_SHARED else f"take away what ended programs have left in {facts.folder}"
    return _by_room(text, facts.free, (MIN_SHARED + 1, ENOUGH_SHARED), remedy)


def judge_space(facts: DiskFacts | None) -> Judgement:
    """Logs, error files and sockets are made there."""
    if facts is None:
        return not_known("no log folder was given: logs go to the temporary folder")
    remedy = "make room there, or name another folder"
    if facts.trouble:
        return failed(f"{facts.folder} cannot be written to ({facts.trouble})", remedy)
    by_size = _by_room(
        f"{facts.folder} has {size(facts.free)} of {size(facts.total)} free",
        facts.free,
        (MIN_SPACE, ENOUGH_SPACE),
        remedy,
    )
    by_files = _by_room(
        f"{facts.folder} has room for {facts.files} more files (inodes)",
        ENOUGH_FILES if facts.files < 0 else facts.files,
        (MIN_FILES, ENOUGH_FILES),
        remedy,
    )
    return max(by_size, by_files, key=lambda each: ("PASS", "WARN", "FAIL").index(each.status))


def _by_room(text: str, room: int, bounds: tuple[int, int], remedy: str) -> Judgement:
    least, enough = bounds
    if room >= enough:
        return passed(text)
    return failed(text, remedy) if room < least else warned(text, remedy)


def size(count: int) -> str:
    """A number of bytes, for people."""
    return f"{count / GIBIBYTE:.1f} GiB" if count >= GIBIBYTE else f"{count / MEBIBYTE:.0f} MiB"


def _nearest(folder: str) -> str:
    """The folder itself, or the nearest one above it that is there."""
    folder = os.path.abspath(folder)
    while not os.path.lexists(folder) and folder != "/":
        folder = os.path.dirname(folder)
    return folder


def _silence(what: str) -> Judgement:
    return failed(
        f"{what} does not answer", "if it is a network file system, see whether its server is up; or name another"
    )


_SPACE = f"below {ENOUGH_SPACE // GIBIBYTE} GiB or {ENOUGH_FILES} files (inodes)"
_NO_SPACE = f"below {MIN_SPACE // MEBIBYTE} MiB or {MIN_FILES} files, or nothing can be written"

LOG_SPACE = Reading(
    read_log_dir,
    (
        Check(
            "log-space",
            "The same for `--log-dir`, or for the nearest folder above it that exists.",
            _SPACE,
            _NO_SPACE,
            "make room, or give another `--log-dir`",
            judge_space,
        ),
    ),
    _silence("the log folder"),
    may_hang=True,
)

DISKS = (
    Reading(
        read_shared_memory,
        (
            Check(
                "shared-memory",
                "Free space in /dev/shm, where NCCL and data loaders put their buffers. If it is full, workers die of "
                "a bus error. Docker gives a container 64 MiB.",
                f"below {ENOUGH_SHARED // GIBIBYTE} GiB",
                f"{MIN_SHARED // MEBIBYTE} MiB or less, or nothing can be written",
                "`--shm-size` of a container; in Kubernetes an `emptyDir` of `medium: Memory` at /dev/shm",
                judge_shared_memory,
            ),
        ),
        _silence("shared memory"),
        may_hang=True,
    ),
    Reading(
        read_temp_dir,
        (
            Check(
                "temp-space",
                "Space and inodes of the temporary folder (`TMPDIR`): sockets, error files, and logs without "
                "`--log-dir`. A file is written there and removed.",
                _SPACE,
                _NO_SPACE,
                "make room, or set `TMPDIR`",
                judge_space,
            ),
        ),
        _silence("the temporary folder"),
        may_hang=True,
    ),
    LOG_SPACE,
)
