"""Checks of this machine: disk space, limits, processors, and accelerators, with details for NVIDIA's GPUs.

Each check reads its facts, and a pure function judges them. A dead network file system or a driver can block the check
(`Check.may_hang`).
"""

from __future__ import annotations

import os
import re
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from rallypoint.base.descriptors import limits
from rallypoint.base.devices import Seen, best, counted, cuda_count, seen, trouble_of
from rallypoint.base.gpu_holders import (
    MUCH,
    Holder,
    Share,
    amount,
    describe_process,
    held_by,
    holder,
    pids_are_ours,
    visible_gpus,
)
from rallypoint.base.kernel import DeniedError, check_kernel
from rallypoint.base.nvml import LIBRARY, GpuMemory, NvmlHealth, nvml_health, nvml_memory
from rallypoint.base.pidfds import HAS_PIDFDS
from rallypoint.base.without_pidfds import FACT, REMEDY
from rallypoint.clusters.preflight.results import (
    EXIT_CODES,
    CheckInputs,
    CheckResult,
    by_amount,
    failed,
    passed,
    skipped,
    warned,
)
from rallypoint.clusters.processors import Processors, processors, shortage
from rallypoint.failures.failure import KERNEL_LOG, LogEntry, log_entries, own_cgroup_path, raw_entries

MEBIBYTE, GIBIBYTE = 1 << 20, 1 << 30


def kernel(_inputs: CheckInputs) -> Iterator[CheckResult]:
    try:
        check_kernel()
    except DeniedError as error:
        yield failed(*str(error).rsplit("; ", 1))
        return
    yield passed("all system calls that an agent needs are allowed") if HAS_PIDFDS else warned(FACT, REMEDY)


# Space for files

SHARED_MEMORY = "/dev/shm"
MIN_SHARED, ENOUGH_SHARED = 64 * MEBIBYTE + 1, GIBIBYTE
"""Docker's default of 64 MiB for a container is too little."""
MIN_SPACE, ENOUGH_SPACE = 64 * MEBIBYTE, GIBIBYTE
MIN_INODES, ENOUGH_INODES = 100, 10_000
_PROBE = 4096


class Room(NamedTuple):
    """The space in a folder: bytes, and files that can still be created (-1: not counted).

    `trouble` says why nothing can be written there; empty after a successful trial.
    """

    folder: str
    total: int = 0
    free: int = 0
    files: int = -1
    trouble: str = ""


def shared_memory(_inputs: CheckInputs) -> Iterator[CheckResult]:
    yield judge_shared_memory(room(SHARED_MEMORY))


def temp_space(_inputs: CheckInputs) -> Iterator[CheckResult]:
    """Check the configured temporary folder. (If it is unusable, `tempfile` silently uses another.)"""
    yield judge_space(room(next(filter(None, map(os.environ.get, ("TMPDIR", "TEMP", "TMP"))), "/tmp")))


def log_space(inputs: CheckInputs) -> Iterator[CheckResult]:
    """Check the log folder, or its nearest existing parent."""
    if inputs.log_dir in ("", os.devnull):
        yield skipped("no log folder is set, so logs go to the temporary folder")
        return
    folder = os.path.abspath(inputs.log_dir)
    while not os.path.lexists(folder) and folder != "/":
        folder = os.path.dirname(folder)
    yield judge_space(room(folder))


def room(folder: str) -> Room:
    """Measure a folder's space, and try to create a file, which has no name and is deleted immediately."""
    try:
        disk = os.statvfs(folder)
    except OSError as error:
        return Room(folder, trouble=error.strerror or str(error))
    files = disk.f_favail if disk.f_files else -1
    trouble = ""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(_PROBE))
    except OSError as error:
        trouble = error.strerror or str(error)
    return Room(folder, disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize, files, trouble)


def judge_shared_memory(space: Room) -> CheckResult:
    """Judge the space for large buffers of NCCL and data loaders. If it is full, they die of a bus error."""
    larger = "make it larger: --shm-size for a container, an emptyDir of medium Memory at /dev/shm in Kubernetes"
    if space.trouble:
        return failed(f"{space.folder} cannot be written to ({space.trouble})", larger)
    remedy = larger if space.total < ENOUGH_SHARED else f"delete files that finished programs left in {space.folder}"
    return by_amount(_free(space), space.free, MIN_SHARED, ENOUGH_SHARED, remedy)


def judge_space(space: Room) -> CheckResult:
    """Judge the space for logs, error files and sockets."""
    remedy = "free some space there, or use another folder"
    if space.trouble:
        return failed(f"{space.folder} cannot be written to ({space.trouble})", remedy)
    by_size = by_amount(_free(space), space.free, MIN_SPACE, ENOUGH_SPACE, remedy)
    files = ENOUGH_INODES if space.files < 0 else space.files
    inodes = f"{space.folder} has room for {space.files} more files (inodes)"
    by_files = by_amount(inodes, files, MIN_INODES, ENOUGH_INODES, remedy)
    return max(by_size, by_files, key=lambda result: EXIT_CODES[result.status])


def _free(space: Room) -> str:
    return f"{space.folder} has {_size(space.free)} of {_size(space.total)} free"


def _size(count: int) -> str:
    return f"{count / GIBIBYTE:.1f} GiB" if count >= GIBIBYTE else f"{count / MEBIBYTE:.0f} MiB"


# Limits that this process's workers inherit

NO_LIMIT = resource.RLIM_INFINITY
MIN_FILES, ENOUGH_FILES, _PLENTY_OF_FILES = 256, 4096, 65536
"""Values for the soft limit. An agent raises its own, but not its workers'."""
MIN_LOCKED = 64 * MEBIBYTE
MIN_PROCESSES, ENOUGH_PROCESSES = 256, 2048

_CAP_IPC_LOCK, _CAP_SYS_ADMIN, _CAP_SYS_RESOURCE = 14, 21, 24
_USER_ROOT = 1 << 64
"""An extra bit for root, whose processes the kernel does not count."""
_FIRST_NAMESPACE = ["0", "0", "4294967295"]
"""The uid_map of the first user namespace. In others, capabilities lift no limits."""


def process_limits(_inputs: CheckInputs) -> Iterator[CheckResult]:
    lifted = _capabilities()
    yield judge_open_files(*limits())
    locked = NO_LIMIT if lifted & 1 << _CAP_IPC_LOCK else resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield judge_locked_memory(locked, _infiniband())
    unbounded = lifted & (_USER_ROOT | 1 << _CAP_SYS_ADMIN | 1 << _CAP_SYS_RESOURCE)
    of_user = NO_LIMIT if unbounded else resource.getrlimit(resource.RLIMIT_NPROC)[0]
    yield judge_processes(of_user, min(_left_in_cgroups(), default=NO_LIMIT))


def judge_open_files(soft: int, hard: int) -> CheckResult:
    text = f"the limit of open files is {_limit(soft)} (hard limit: {_limit(hard)})"
    if soft == NO_LIMIT:
        return passed(text)
    most = _PLENTY_OF_FILES if hard == NO_LIMIT else min(hard, _PLENTY_OF_FILES)
    remedy = f"set `ulimit -n {most}`"
    if most < ENOUGH_FILES:
        remedy = (
            f"raise the hard limit to {_PLENTY_OF_FILES}: LimitNOFILE= for a service, --ulimit nofile= for a container"
        )
    return by_amount(text, soft, MIN_FILES, ENOUGH_FILES, remedy)


def judge_locked_memory(limit: int, infiniband: Sequence[str]) -> CheckResult:
    """Judge the limit in bytes. Only InfiniBand (its devices: `infiniband`) needs much locked memory."""
    if not infiniband:
        return skipped("only InfiniBand devices need it, and this machine has none")
    if limit == NO_LIMIT:
        return passed(f"locked memory is unlimited for {', '.join(infiniband)}")
    text = f"{limit / MEBIBYTE:.3g} MiB may be locked, but {', '.join(infiniband)} needs more"
    remedy = "set `ulimit -l unlimited` (LimitMEMLOCK=infinity for a service, --ulimit memlock=-1 for a container)"
    return failed(text, remedy) if limit < MIN_LOCKED else warned(text, remedy)


def judge_processes(of_user: int, left_in_cgroup: int) -> CheckResult:
    """Each worker is a process with many threads and more processes for data loaders; threads count too."""
    left, what, remedy = of_user, "this user can have", "raise it: `ulimit -u`, TasksMax= for a service"
    if left_in_cgroup != NO_LIMIT and (left == NO_LIMIT or left_in_cgroup < left):
        left, what = left_in_cgroup, "this control group can still create"
        remedy = "raise pids.max: --pids-limit for a container, podPidsLimit in Kubernetes, TasksMax= for a service"
    if left == NO_LIMIT:
        return passed("the number of processes and threads is not limited")
    return by_amount(f"{what} {left} processes and threads", left, MIN_PROCESSES, ENOUGH_PROCESSES, remedy)


def _limit(number: int) -> str:
    return "unlimited" if number == NO_LIMIT else str(number)


def _capabilities() -> int:
    """This process's effective capabilities, as bits, with `_USER_ROOT`; 0 if they lift no limits or are unknown."""
    with suppress(OSError, ValueError):
        with open("/proc/self/uid_map", encoding="utf-8") as file:
            if file.read().split() != _FIRST_NAMESPACE:
                return 0
        with open("/proc/self/status", encoding="utf-8") as lines:
            effective = int(next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0"), 16)
        return effective | (_USER_ROOT if os.getuid() == 0 else 0)
    return 0


def _infiniband() -> list[str]:
    try:
        return sorted(os.listdir("/sys/class/infiniband"))
    except OSError:
        return []


def _left_in_cgroups() -> Iterator[int]:
    """What is left of `pids.max` in this control group and its parents."""
    folder, second = own_cgroup_path("pids")
    top = "/sys/fs/cgroup" if second else "/sys/fs/cgroup/pids"
    path = top + folder.rstrip("/")
    if not os.path.isdir(path):  # a container sees its own group at the top, but under its outside name
        path = top
    while path.startswith(top):
        with suppress(OSError, ValueError):  # ValueError: `max`, which means no limit
            yield max(0, _number(f"{path}/pids.max") - _number(f"{path}/pids.current"))
        path = os.path.dirname(path)


def _number(path: str) -> int:
    with open(path, encoding="utf-8") as file:
        return int(file.read())


# Processors


def cpus(inputs: CheckInputs) -> Iterator[CheckResult]:
    rows = seen(os.environ)
    row = best(rows)
    workers = inputs.workers or (len(row.devices) if row else 0)
    yield judge_cpus(processors(), workers, os.environ)


def judge_cpus(found: Processors, workers: int, environ: Mapping[str, str]) -> CheckResult:
    """Judge whether each worker can have a processor; `workers` is 0 if unknown."""
    if short := shortage(workers, found, environ):
        return warned(*short)
    text = f"this process may run on {found.allowed} of {found.there} processors"
    return passed(f"{text}, with a CPU quota of {found.quota:.3g}" if found.quota < found.allowed else text)


# GPUs: information from NVML and the kernel's log

_FEW = 8
"""Maximum number of processes named in one result."""
XID_HOURS = 24
PROGRAM_XIDS = frozenset({13, 31, 32, 43, 45, 68, 69})
"""Errors that a program's own mistakes cause (NVIDIA's catalogue of Xid errors). Others may be the GPU's fault."""
_XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)")


def gpus(inputs: CheckInputs) -> Iterator[CheckResult]:
    listed = cuda_count({})
    has_driver = listed or os.path.exists("/proc/driver/nvidia/version")
    health = nvml_health() if has_driver else None
    if has_driver:
        yield judge_gpus(health, listed, cuda_count(os.environ), inputs.workers)
    else:
        rows = seen(os.environ)
        yield judge_accelerators(best(rows), *trouble_of(rows), inputs.workers)
    yield judge_gpu_memory(health, memory_of_others(inputs.job) if health is not None else ())


def judge_gpus(health: NvmlHealth | None, listed: int = 0, visible: int = 0, workers: int = 0) -> CheckResult:
    """Judge whether the driver answers for all GPUs.

    `listed` GPUs have the kernel's driver and a device file; programs may use `visible` ones. `workers` is 0 if
    unknown.
    """
    if health is None:
        return warned(
            f"{LIBRARY} was not found, so the state of {listed} GPUs is unknown",
            "install it with the driver; in a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    see = "check `nvidia-smi` and the kernel log; reset the GPU or restart the machine"
    if health.trouble:
        return failed(f"the NVIDIA driver does not work: {health.trouble}", see)
    known = health.gpus
    lost = [f"{gpu.address} ({gpu.trouble})" for gpu in known if gpu.trouble]
    if lost:
        return failed(f"{len(lost)} of {len(known)} GPUs do not answer: {', '.join(lost)}", see)
    if len(known) < listed:
        return failed(f"the kernel lists {listed} GPUs, but the driver lists {len(known)}", see)
    kinds = Counter(gpu.name for gpu in known)
    text = f"{', '.join(f'{count} {name}' for name, count in kinds.items()) or 'none'}, driver {health.driver}"
    if workers > visible > 0:
        return warned(f"{text}: {workers} workers share {visible}", "set --nproc-per-node=gpu")
    return passed(text)


def judge_accelerators(row: Seen | None, trouble: str, advice: str, workers: int = 0) -> CheckResult:
    """Count accelerators other than NVIDIA's, or say why they cannot be counted."""
    if row is not None:
        text = f"{counted(len(row.devices), row.vendor)}, whose health is not checked"
        if workers > len(row.devices):
            return warned(f"{text}: {workers} workers share them", "set --nproc-per-node=auto")
        return passed(text)
    if trouble:
        remedy = "set --nproc-per-node to a number"
        return warned(trouble, f"{advice}; or {remedy}" if advice else remedy)
    return skipped("no accelerator driver has devices here")


def memory_of_others(job: str) -> list[str]:
    """Memory that processes outside the job use on GPUs that programs see, one text per process."""
    gpus = visible_gpus(nvml_memory(), os.environ)
    if not pids_are_ours():
        return _unnamed(gpus)
    shares = [share for share in _large_shares(gpus) if holder(share.pid, os.getpid(), job) is Holder.OTHER]
    return held_by(shares, {share.pid: describe_process(share.pid) for share in shares})


def _large_shares(gpus: Mapping[int, GpuMemory]) -> list[Share]:
    processes = ((index, process) for index, gpu in gpus.items() for process in gpu.processes or ())
    return [Share(index, *process) for index, process in processes if (process.used or 0) >= MUCH]


def _unnamed(gpus: Mapping[int, GpuMemory]) -> list[str]:
    """One text per GPU, if NVML's pids mean nothing."""
    totals = Counter[int]()
    for share in _large_shares(gpus):
        totals[share.gpu] += share.used or 0
    whom = "processes that this container cannot identify"
    return [f"GPU {index}: {amount(used)} held by {whom}" for index, used in totals.items()]


def judge_gpu_memory(health: NvmlHealth | None, holders: Sequence[str] = ()) -> CheckResult:
    """Judge whether the memory is sound and free; `holders` describes what processes outside the job use."""
    known = [] if health is None else [gpu for gpu in health.gpus if not gpu.trouble]
    if not known:
        return skipped("this machine has no GPU")
    worn = [gpu.address for gpu in known if gpu.remap_failed]
    if worn:
        return failed(f"rows of memory could not be replaced on {', '.join(worn)}", "have the GPU replaced")
    reset = "reset the GPU (`nvidia-smi -r`) or restart the machine"
    broken = [f"{gpu.errors} on {gpu.address}" for gpu in known if gpu.errors > 0]
    if broken:
        return failed(f"memory errors that ECC could not correct: {', '.join(broken)}", reset)
    pending = [gpu.address for gpu in known if gpu.remap_pending]
    if pending:
        return warned(f"memory rows will be replaced at the next reset of {', '.join(pending)}", reset)
    if holders:
        more = f"; and {len(holders) - _FEW} more" if len(holders) > _FEW else ""
        fact = f"{'; '.join(holders[:_FEW])}{more}"
        return warned(fact, "end that process, or choose other GPUs with CUDA_VISIBLE_DEVICES")
    if all(gpu.errors < 0 for gpu in known):
        return skipped("ECC is off or not supported")
    return passed(f"no errors on {len(known)} GPUs since the driver was loaded")


def xid(_inputs: CheckInputs) -> Iterator[CheckResult]:
    try:
        yield judge_xid(xid_errors(log_entries(raw_entries()), time.monotonic()))
    except OSError as error:
        yield skipped(f"{KERNEL_LOG} cannot be read ({error.strerror})")


class Xid(NamedTuple):
    """An error in NVIDIA's driver log: seconds ago, address, and number."""

    ago: float
    address: str
    number: int


def xid_errors(entries: Iterable[LogEntry], now: float) -> list[Xid]:
    """Find errors in log entries; `now` is on the same clock."""
    matches = ((now - entry.moment, _XID.search(entry.text)) for entry in entries)
    return [Xid(ago, match[1], int(match[2])) for ago, match in matches if match]


def judge_xid(errors: Iterable[Xid]) -> CheckResult:
    """Judge errors from the last hours that are not a program's own mistakes."""
    recent = [error for error in errors if error.ago < XID_HOURS * 3600 and error.number not in PROGRAM_XIDS]
    if not recent:
        return passed(f"none in the last {XID_HOURS} hours, except errors that programs cause")
    last = recent[-1]
    return warned(
        f"{len(recent)} in the last {XID_HOURS} hours, the last {last.ago / 3600:.1f} hours ago: "
        f"Xid {last.number} of {last.address}",
        "look up the number in NVIDIA's catalogue of Xid errors, and check `dmesg | grep Xid`",
    )
