"""Finds the processes that have memory on this machine's GPUs, and describes them in messages.

Laws:

1. NVML's pids belong to the first pid namespace. In another one (most containers), a pid may belong to no process or
   to a different one. We then report nothing about processes (`pids_are_ours`).
2. A process that /proc hides (`hidepid`) is still alive: the kernel denies a signal to it, but reports "no such
   process" for one that has ended.
3. Information from /proc may be outdated a moment later. Use it for messages and short waits, never for signals.

Messages number GPUs like `nvidia-smi`, by their order on the PCI bus, and not like a program that CUDA_VISIBLE_DEVICES
restricts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from rallypoint.base.devices import cuda_devices
from rallypoint.base.log import printable
from rallypoint.base.process_table import read_stat
from rallypoint.base.procfs import process_user, read_text
from rallypoint.base.vendors import CUDA

if TYPE_CHECKING:
    from rallypoint.base.nvml import GpuMemory

_MEBIBYTE, _GIBIBYTE = 1 << 20, 1 << 30
MUCH = _GIBIBYTE
"""Minimum memory, in bytes, for a message about a process: programs that only query the driver use less."""
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""The inode of the first pid namespace (PROC_PID_INIT_INO of the kernel)."""
_MAX_ENVIRONMENT = 1 << 20
_MAX_PARENTS = 64


class Holder(StrEnum):
    """How a process with GPU memory is related to this agent."""

    ENDED = "ended"
    OURS = "ours"
    OTHER = "other"


class Share(NamedTuple):
    """Memory on the GPU with this index: its bytes (None if unknown) and the process's pid (0 if unknown)."""

    gpu: int
    pid: int
    used: int | None


def pids_are_ours() -> bool:
    """Whether NVML's pids match the processes in /proc here."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def visible_gpus(all_gpus: Iterable[GpuMemory], environ: Mapping[str, str]) -> dict[int, GpuMemory]:
    """GPUs that a program with these variables would see, by index; all GPUs if none can be identified."""
    gpus, visible = dict(enumerate(all_gpus)), cuda_devices(environ)
    if not visible and CUDA in environ:
        return {}
    uuids, addresses = {gpu.uuid for gpu in visible}, {gpu.address.lower() for gpu in visible}
    by_rank = {
        index: gpu
        for index, gpu in gpus.items()
        if (gpu.uuid and gpu.uuid in uuids) or (gpu.address and gpu.address in addresses)
    }
    return by_rank or gpus


def holder(pid: int, agent: int, job: str) -> Holder:
    """Classify a process for the agent with this pid, which runs a node of this job. `OURS` are the agent's
    descendants, and processes that other agents of the job on this machine started.
    """
    stat = read_stat(pid)
    if stat is None:
        return Holder.OTHER if _exists(pid) else Holder.ENDED
    if stat.ended:
        return Holder.ENDED
    return Holder.OURS if _descends(pid, agent) or _is_of_job(pid, job) else Holder.OTHER


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _descends(pid: int, ancestor: int) -> bool:
    for _ in range(_MAX_PARENTS):
        if pid == ancestor:
            return True
        stat = read_stat(pid)
        if stat is None or stat.parent <= 0:
            return False
        pid = stat.parent
    return False


def _is_of_job(pid: int, job: str) -> bool:
    variable = f"TORCHELASTIC_RUN_ID={job}"
    return bool(job) and variable in read_text(f"/proc/{pid}/environ", _MAX_ENVIRONMENT).split("\0")


def describe_process(pid: int) -> str:
    """A live process, described for a message: `pid 4711 (python, user bob)`."""
    name = printable(read_text(f"/proc/{pid}/comm", 64).rstrip("\n"))
    user = process_user(pid)
    facts = [name, "" if user is None else f"user {_user_name(user)}"]
    known = ", ".join(filter(None, facts))
    return f"pid {pid} ({known})" if known else f"pid {pid}"


def _user_name(user: int) -> str:
    from pwd import getpwuid

    try:
        return printable(getpwuid(user).pw_name)
    except KeyError:
        return str(user)


def held_by(shares: Iterable[Share], names: Mapping[int, str]) -> list[str]:
    """Describe each process: `GPU 0: 61 GiB, GPU 1: 61 GiB held by pid 4711 (python, user bob)`.

    Args:
        shares: the memory.
        names: the text after "held by", by pid.
    """
    by_pid: dict[int, list[str]] = {}
    for share in shares:
        by_pid.setdefault(share.pid, []).append(f"GPU {share.gpu}: {amount(share.used)}")
    return [f"{', '.join(parts)} held by {names[pid]}" for pid, parts in by_pid.items()]


def amount(used: int | None) -> str:
    """Format bytes for a message: `61 GiB`, `300 MiB`."""
    if used is None:
        return "memory"
    return f"{used / _GIBIBYTE:.0f} GiB" if used >= _GIBIBYTE else f"{used / _MEBIBYTE:.0f} MiB"
