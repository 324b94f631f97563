"""NVIDIA's management library (NVML): the driver's GPUs, their health, memory and NVLink domains.

Laws:

1. Nothing here raises. What the library, the driver or the GPU does not answer is unknown in the result; the rest is
   still valid. An old library lacks functions; a virtual machine or a MIG instance refuses some.
2. Code that only counts GPUs (`base.devices`) imports neither this file nor `ctypes`.
3. Any call can hang as long as the driver does. A caller that must not hang uses a thread or process that it never
   waits for.

GPUs are in PCI bus order, as in `nvidia-smi`, starting at index 0.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

T = TypeVar("T")

LIBRARY = "libnvidia-ml.so.1"

_MAX_UUID = 96
_UNCORRECTED, _SINCE_LOADED = 1, 0
"""Values of `nvmlMemoryErrorType_t` and `nvmlEccCounterType_t`."""


class _PciInfo(ctypes.Structure):
    _fields_ = (
        ("legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("device_id", ctypes.c_uint),
        ("subsystem_id", ctypes.c_uint),
        ("address", ctypes.c_char * 32),
    )


def nvml_devices(library: str = LIBRARY) -> list[tuple[str, str]]:
    """PCI address and UUID of each GPU, in PCI bus order; empty texts if unknown.

    Empty if the library (its name or path) is missing or does not work.
    """
    return _of_each_gpu(_device, library)


def _of_each_gpu(query: Callable[[ctypes.CDLL, int], T], library: str) -> list[T]:
    try:
        nvml = ctypes.CDLL(library)
        if nvml.nvmlInit_v2():
            return []
    except (OSError, AttributeError):
        return []
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return []
        return [query(nvml, number) for number in range(count.value)]
    except AttributeError:  # the library is older than these functions
        return []
    finally:
        nvml.nvmlShutdown()


def _device(nvml: ctypes.CDLL, number: int) -> tuple[str, str]:
    handle = ctypes.c_void_p()
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(number), ctypes.byref(handle)):
        return "", ""
    uuid = ctypes.create_string_buffer(_MAX_UUID)
    if nvml.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(_MAX_UUID)):
        uuid.value = b""
    pci = _PciInfo()
    if nvml.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(pci)):
        return "", uuid.value.decode(errors="replace")
    address = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
    return address, uuid.value.decode(errors="replace")


class GpuHealth(NamedTuple):
    """The health of one GPU: its PCI address, its name, and why the driver does not answer for it, if so.

    `errors` counts memory errors since the driver was loaded that ECC could not correct; -1 without ECC. Two fields
    describe the replacement of bad memory rows by spare ones: whether it waits for a reset, and whether it failed.
    """

    address: str
    name: str = ""
    trouble: str = ""
    errors: int = -1
    remap_pending: bool = False
    remap_failed: bool = False


class NvmlHealth(NamedTuple):
    trouble: str = ""
    driver: str = ""
    gpus: tuple[GpuHealth, ...] = ()


def nvml_health(library: str = LIBRARY) -> NvmlHealth | None:
    """The health of all GPUs, in PCI bus order; None without the library (its name or path).

    Can hang as long as the driver does.
    """
    try:
        nvml = ctypes.CDLL(library)
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        code = nvml.nvmlInit_v2()
    except (OSError, AttributeError):
        return None
    if code:
        return NvmlHealth(_error(nvml, code))
    try:
        driver = ctypes.create_string_buffer(_MAX_UUID)
        nvml.nvmlSystemGetDriverVersion(driver, ctypes.c_uint(_MAX_UUID))
        count = ctypes.c_uint()
        code = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        gpus = tuple(_health(nvml, number) for number in range(count.value))
        return NvmlHealth(_error(nvml, code), driver.value.decode(errors="replace"), gpus)
    except AttributeError as error:
        return NvmlHealth(f"{library} is too old ({error})")
    finally:
        nvml.nvmlShutdown()


def _error(nvml: ctypes.CDLL, code: int) -> str:
    return nvml.nvmlErrorString(code).decode(errors="replace") if code else ""


def _health(nvml: ctypes.CDLL, number: int) -> GpuHealth:
    handle = ctypes.c_void_p()
    if code := nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(number), ctypes.byref(handle)):
        return GpuHealth(f"GPU {number}", trouble=_error(nvml, code))
    name = ctypes.create_string_buffer(_MAX_UUID)
    code = nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(_MAX_UUID))
    address = _device(nvml, number)[0] or f"GPU {number}"
    errors = ctypes.c_ulonglong()
    arguments = (handle, _UNCORRECTED, _SINCE_LOADED, ctypes.byref(errors))
    counted = _query(nvml, "nvmlDeviceGetTotalEccErrors", *arguments)
    corrected, uncorrected, pending, failed = (ctypes.c_uint() for _ in range(4))
    counts = tuple(map(ctypes.byref, (corrected, uncorrected, pending, failed)))
    if not _query(nvml, "nvmlDeviceGetRemappedRows", handle, *counts):  # GPUs before Ampere retire pages instead
        _query(nvml, "nvmlDeviceGetRetiredPagesPendingStatus", handle, ctypes.byref(pending))
    return GpuHealth(
        address,
        name.value.decode(errors="replace"),
        _error(nvml, code),
        errors.value if counted else -1,
        bool(pending.value),
        bool(failed.value),
    )


def _query(nvml: ctypes.CDLL, function: str, *arguments: object) -> bool:
    """Whether the library and the GPU answered. The answer is then in the arguments."""
    entry = getattr(nvml, function, None)
    return entry is not None and entry(*arguments) == 0


_COMPLETED = 3
"""The `nvmlGpuFabricState_t` of a GPU that is registered with its fabric."""


class _FabricInfo(ctypes.Structure):
    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


def nvml_fabrics(library: str = LIBRARY) -> list[str]:
    """The NVLink domain and partition of each GPU, in the form of the label `nvidia.com/gpu.clique`: UUID, period and
    clique; empty texts for GPUs without a domain. Like `nvml_devices`, but can hang as long as the driver does.
    """
    return _of_each_gpu(_fabric, library)


def _fabric(nvml: ctypes.CDLL, number: int) -> str:
    handle, info = ctypes.c_void_p(), _FabricInfo()
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(number), ctypes.byref(handle)):
        return ""
    known = _query(nvml, "nvmlDeviceGetGpuFabricInfo", handle, ctypes.byref(info))
    cluster = bytes(info.cluster)
    if not known or info.state != _COMPLETED or info.status or not any(cluster):  # a single machine has no cluster
        return ""
    from uuid import UUID

    return f"{UUID(bytes=cluster)}.{info.clique}"


_INSUFFICIENT_SIZE = 7
"""The array is too small; the count is then the required size."""
_UNKNOWN_BYTES = (1 << 64) - 1
_SOME_PROCESSES, MOST_PROCESSES = 64, 4096
"""The first and the last array size to try for the processes on a GPU."""


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _ProcessInfo(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class GpuProcess(NamedTuple):
    """A process with memory on a GPU, in bytes over all MIG instances; None if the driver does not report them."""

    pid: int
    used: int | None = None


class GpuMemory(NamedTuple):
    """The memory of one GPU in bytes, and the processes that are computing on it; None if unknown.

    Pids are those of the machine's first pid namespace.
    """

    address: str = ""
    uuid: str = ""
    total: int | None = None
    used: int | None = None
    processes: tuple[GpuProcess, ...] | None = None


@contextmanager
def nvml_kept_open(library: str = LIBRARY) -> Iterator[bool]:
    """Keep the library initialized inside the block: repeated calls in this file then cost less driver time.

    Yields whether the library (its name or path) works.
    """
    try:
        nvml = ctypes.CDLL(library)
        works = nvml.nvmlInit_v2() == 0
    except (OSError, AttributeError):
        works = False
    try:
        yield works
    finally:
        if works:
            nvml.nvmlShutdown()


def nvml_memory(library: str = LIBRARY) -> list[GpuMemory]:
    """The memory of each GPU, and its owners. Like `nvml_devices`, but can hang as long as the driver does."""
    return _of_each_gpu(_memory, library)


def _memory(nvml: ctypes.CDLL, number: int) -> GpuMemory:
    address, uuid = _device(nvml, number)
    handle, memory = ctypes.c_void_p(), _Memory()
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(number), ctypes.byref(handle)):
        return GpuMemory(address, uuid)
    if not _query(nvml, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory)):
        return GpuMemory(address, uuid, processes=_processes(nvml, handle))
    return GpuMemory(address, uuid, memory.total, memory.used, _processes(nvml, handle))


def _processes(nvml: ctypes.CDLL, handle: ctypes.c_void_p) -> tuple[GpuProcess, ...] | None:
    names = ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2")
    ask = next((entry for name in names if (entry := getattr(nvml, name, None)) is not None), None)
    room = _SOME_PROCESSES
    while ask is not None and room <= MOST_PROCESSES:
        count, infos = ctypes.c_uint(room), (_ProcessInfo * room)()
        code = ask(handle, ctypes.byref(count), infos)
        if code == _INSUFFICIENT_SIZE:
            room = max(2 * room, count.value)
            continue
        return None if code else _of_each_process(infos[: min(count.value, room)])
    return None


def _of_each_process(infos: list[_ProcessInfo]) -> tuple[GpuProcess, ...]:
    """Sum up by process, since a process is listed once per MIG instance that it uses."""
    memory: dict[int, int | None] = {}
    for info in infos:
        before = memory.get(info.pid, 0)
        memory[info.pid] = None if before is None or info.used == _UNKNOWN_BYTES else before + info.used
    return tuple(GpuProcess(pid, used) for pid, used in memory.items())
