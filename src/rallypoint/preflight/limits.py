"""Limits of this process that its workers inherit: open files, locked memory, processes."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from rallypoint.base.descriptors import limits
from rallypoint.preflight.results import Judgement, failed, not_known, passed, warned
from rallypoint.preflight.table import Check, CheckInputs, Reading

NO_LIMIT = resource.RLIM_INFINITY

MIN_FILES, ENOUGH_FILES, _PLENTY_OF_FILES = 256, 4096, 65536
"""Of the soft limit: an agent raises its own, and leaves that of its workers."""
MIN_LOCKED, MEBIBYTE = 64 << 20, 1 << 20
MIN_PROCESSES, ENOUGH_PROCESSES = 256, 2048

_CAP_IPC_LOCK, _CAP_SYS_ADMIN, _CAP_SYS_RESOURCE = 14, 21, 24
_USER_ROOT = 1 << 64
"""Beside the capabilities: this is root, whose processes the kernel does not count."""
_FIRST_NAMESPACE = ["0", "0", "4294967295"]
"""The uid_map of the first user namespace; capabilities of others lift no limits."""


class LimitFacts(NamedTuple):
    """Limits are numbers, or `NO_LIMIT`; memory is in bytes."""

    soft_files: int
    hard_files: int
    locked_memory: int
    may_lock: bool
    """Whether a capability lifts the limit of locked memory."""
    infiniband: tuple[str, ...]
    """The devices of /sys/class/infiniband."""
    processes: int
    """The limit for this user; `NO_LIMIT` where a capability lifts it."""
    cgroup_processes: int
    """Processes and threads that this control group may still make."""


def read_limits(_inputs: CheckInputs) -> LimitFacts:
    """Read the limits of this process."""
    lifted = _capabilities()
    soft, hard = limits()
    unbounded = bool(lifted & (_USER_ROOT | 1 << _CAP_SYS_ADMIN | 1 << _CAP_SYS_RESOURCE))
    return LimitFacts(
        soft,
        hard,
        resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        bool(lifted & 1 << _CAP_IPC_LOCK),
        _devices("/sys/class/infiniband"),
        NO_LIMIT if unbounded else resource.getrlimit(resource.RLIMIT_NPROC)[0],
        min(_left_in_cgroups(), default=NO_LIMIT),
    )


def judge_open_files(facts: LimitFacts) -> Judgement:
    """The soft limit counts: it is what workers start with."""
    text = f"a process may have {_limit(facts.soft_files)} open files (hard limit: {_limit(facts.hard_files)})"
    if facts.soft_files == NO_LIMIT or facts.soft_files >= ENOUGH_FILES:
        return passed(text)
    most = _PLENTY_OF_FILES if facts.hard_files == NO_LIMIT else min(facts.hard_files, _PLENTY_OF_FILES)
    remedy = f"set `ulimit -n {most}`"
    if most < ENOUGH_FILES:
        remedy = (
            f"raise the hard limit to {_PLENTY_OF_FILES}: LimitNOFILE= of a service, --ulimit nofile= of a container"
        )
    return failed(text, remedy) if facts.soft_files < MIN_FILES else warned(text, remedy)


def judge_locked_memory(facts: LimitFacts) -> Judgement:
    """Only InfiniBand needs much of it."""
    if not facts.infiniband:
        return not_known("there are no InfiniBand devices, which alone need it")
    if facts.may_lock or facts.locked_memory == NO_LIMIT:
        return passed(f"memory may be locked without limit for {', '.join(facts.infiniband)}")
    text = f"{facts.locked_memory / MEBIBYTE:.3g} MiB may be locked, and {', '.join(facts.infiniband)} needs more"
    remedy = "set `ulimit -l unlimited` (LimitMEMLOCK=infinity of a service, --ulimit memlock=-1 of a container)"
    return failed(text, remedy) if facts.locked_memory < MIN_LOCKED else warned(text, remedy)


def judge_processes(facts: LimitFacts) -> Judgement:
    """Each worker is a process of many threads, and its data loaders are more of them; threads count too."""
    left, what, remedy = facts.processes, "this user may have", "raise it: `ulimit -u`, TasksMax= of a service"
    if facts.cgroup_processes != NO_LIMIT and (left == NO_LIMIT or facts.cgroup_processes < left):
        left, what = facts.cgroup_processes, "this control group can still make"
        remedy = "raise pids.max: --pids-limit of a container, podPidsLimit of Kubernetes, TasksMax= of a service"
    if left == NO_LIMIT:
        return passed("no limit of processes and threads")
    text = f"{what} {left} processes and threads"
    if left >= ENOUGH_PROCESSES:
        return passed(text)
    return failed(text, remedy) if left < MIN_PROCESSES else warned(text, remedy)


def _limit(number: int) -> str:
    return "unlimited" if number == NO_LIMIT else str(number)


def _capabilities() -> int:
    """The effective ones of this process, as bits, with `_USER_ROOT`; none if they lift nothing, or are unknown."""
    with suppress(OSError, ValueError):
        with open("/proc/self/uid_map", encoding="utf-8") as file:
            if file.read().split() != _FIRST_NAMESPACE:
                return 0
        with open("/proc/self/status", encoding="utf-8") as lines:
            found = int(next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0"), 16)
        return found | (_USER_ROOT if os.getuid() == 0 else 0)
    return 0


def _devices(folder: str) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError:
        return ()


def _left_in_cgroups() -> Iterator[int]:
    """What is left of `pids.max` in this control group and those above it."""
    folder, second = _own_cgroup()
    top = "/sys/fs/cgroup" if second else "/sys/fs/cgroup/pids"
    path = top + folder.rstrip("/")
    if not os.path.isdir(path):  # a container sees its own group at the top, by the name that it has outside
        path = top
    while path.startswith(top):
        with suppress(OSError, ValueError):
            yield max(0, _number(f"{path}/pids.max") - _number(f"{path}/pids.current"))
        path = os.path.dirname(path)


def _own_cgroup() -> tuple[str, bool]:
    """The control group that counts processes, and whether it is of the second version."""
    unified = ""
    with suppress(OSError), open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            number, controllers, path = line.rstrip("\n").split(":", 2)
            if "pids" in controllers.split(","):
                return path, False
            unified = path if number == "0" else unified
    return unified, True


def _number(path: str) -> int:
    """The number in a file; ValueError for `max`."""
    with open(path, encoding="utf-8") as file:
        return int(file.read())


_READING_FAILED = not_known("the limits could not be read in time")

LIMITS = Reading(
    read_limits,
    (
        Check(
            "open-files",
            "Open files that a worker may have: each connection is one, and so is each tensor that a data loader "
            "passes on. (An agent raises its own limit, but not that of its workers.)",
            f"below {ENOUGH_FILES}",
            f"below {MIN_FILES}",
            f"`ulimit -n {_PLENTY_OF_FILES}`, `LimitNOFILE=` of a service, `--ulimit nofile=` of a container",
            judge_open_files,
        ),
        Check(
            "locked-memory",
            "The limit of locked memory, where /sys/class/infiniband has devices: InfiniBand registers its buffers as "
            "locked memory, and NCCL fails without it.",
            "not unlimited, and no CAP_IPC_LOCK",
            f"below {MIN_LOCKED // MEBIBYTE} MiB",
            "`ulimit -l unlimited`, `LimitMEMLOCK=infinity` of a service, `--ulimit memlock=-1` of a container",
            judge_locked_memory,
        ),
        Check(
            "processes",
            "Processes and threads that this user may have (`ulimit -u`), and those that are left in this control "
            "group and in the ones above it (`pids.max`). A worker with its libraries and data loaders has hundreds.",
            f"below {ENOUGH_PROCESSES}",
            f"below {MIN_PROCESSES}",
            "`ulimit -u`, `--pids-limit` of a container, `podPidsLimit` of Kubernetes, `TasksMax=` of a service",
            judge_processes,
        ),
    ),
    _READING_FAILED,
)
