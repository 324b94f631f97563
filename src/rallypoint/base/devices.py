"""Counts the processors, GPUs and XPUs that this process may use, by the kernel and the driver alone.

No GPU framework is loaded: the driver's files under /proc, /dev and /sys list the devices, and CUDA_VISIBLE_DEVICES or
ZE_AFFINITY_MASK selects those that a program would see. The rules of the first are in the CUDA C++ Programming Guide,
section "CUDA Environment Variables", those of the second in the Level Zero specification, section "Environment
Variables". NVIDIA's management library, loaded only when needed, is for machines whose kernel hides the driver's files.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from rallypoint.base.errors import UserError

T = TypeVar("T")
VISIBLE, VISIBLE_ROCM = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
"""ROCm reads both, and prefers the second."""

_INFORMATION = re.compile(r"^([^:\n]+?)[ \t]*:[ \t]*(.*?)[ \t]*$", re.MULTILINE)
_INTEL = ("i915", "xe")
_INTEGRATED = re.compile(r"[0-9a-f]{4}:00:[0-9a-f]{2}\.[0-7]")
_AFFINITY_ENTRY = re.compile(r"[0-9]+(\.[0-9]+)?")


class Gpu(NamedTuple):
    """One GPU: its PCI address (`0000:07:00.0`) and its UUID, each empty if unknown."""

    address: str
    uuid: str


def cpu_count() -> int:
    """Processors that this process may run on: its cpuset and affinity mask count, as in torch."""
    return len(os.sched_getaffinity(0))


def cuda_count(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """The number of `cuda_devices`; 0 without an NVIDIA driver."""
    return len(cuda_devices(environ, root))


def cuda_devices(environ: Mapping[str, str], root: Path = Path("/")) -> list[Gpu]:
    """The GPUs that a CUDA program started with `environ` would see, in the order of their numbers there.

    Without CUDA_VISIBLE_DEVICES that is the order of the PCI bus. A MIG instance's GPU is known only if the instance's
    name has it. `root` is the folder of `proc` and `dev`.
    """
    gpus = _gpus(root)
    visible = environ.get(VISIBLE)
    return gpus if visible is None else _visible(visible, gpus)


def xpu_count(environ: Mapping[str, str], root: Path = Path("/"), *, integrated: bool = True) -> int:
    """Intel GPUs that a program started with `environ` would see: those on cards, or else (`integrated`) the one in
    the processor.
    """
    addresses = [address for driver in _INTEL for address in _bound(root / "sys/bus/pci/drivers" / driver, root)]
    cards = [address for address in addresses if not _INTEGRATED.fullmatch(address)]
    found = cards or (addresses if integrated else [])
    mask = environ.get("ZE_AFFINITY_MASK")
    return _count_masked(mask, len(found)) if mask else len(found)


def one_gpu_per_worker(environ: Mapping[str, str], workers: int) -> list[dict[str, str]]:
    """The variables of each of `workers` workers if each should see one GPU (contract section 1.8). Raises UserError:
    the variable that names the devices in `environ` names fewer than there are workers.
    """
    source = VISIBLE_ROCM if environ.get(VISIBLE_ROCM) else VISIBLE
    named = [entry.strip() for entry in environ.get(source, ",".join(map(str, range(workers)))).split(",")]
    if len(named) < workers:
        raise UserError(
            f"with virtual local ranks each worker gets one device of {source}={environ[source]!r}, which names "
            f"{len(named)} for {workers} worker{'' if workers == 1 else 's'}; name more, or start fewer workers"
        )
    return [dict.fromkeys({VISIBLE, source}, device) for device in named[:workers]]


def _gpus(root: Path) -> list[Gpu]:
    folders = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    found = {file.parent.name: dict(_INFORMATION.findall(file.read_text(errors="replace"))) for file in folders}
    nodes = {path.name for path in (root / "dev").glob("nvidia[0-9]*")}
    if found:
        # A container may see the whole machine's /proc but have the device nodes of a few GPUs only.
        return [
            Gpu(address, facts.get("GPU UUID", ""))
            for address, facts in found.items()
            if not nodes or f"nvidia{facts.get('Device Minor', '')}" in nodes
        ]
    if nodes or (root / "dev/dxg").exists():  # a sandbox that hides the driver's /proc, or Windows's Linux
        found_by_nvml = [Gpu(address, uuid) for address, uuid in nvml_devices()] if root == Path("/") else []
        return found_by_nvml or [Gpu("", "")] * len(nodes)
    return []


def _visible(visible: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    """As CUDA: the list counts up to the first entry that names no GPU; a GPU named twice makes it void."""
    entries = [entry.strip() for entry in visible.split(",")]
    if entries[0].startswith("MIG-"):  # a CUDA program sees one MIG instance, however many are named
        return [_mig_parent(entries[0], gpus)] if gpus else []
    chosen: list[int] = []
    for entry in entries:
        gpu = _index(entry, gpus)
        if gpu is None:
            break
        if gpu in chosen:
            return []
        chosen.append(gpu)
    return [gpus[number] for number in chosen]


def _mig_parent(entry: str, gpus: Sequence[Gpu]) -> Gpu:
    """The GPU of `MIG-<GPU-UUID>/<instance>/<instance>`; newer names have no GPU."""
    uuid = entry.removeprefix("MIG-").partition("/")[0]
    return next((gpu for gpu in gpus if gpu.uuid and gpu.uuid == uuid), gpus[0] if len(gpus) == 1 else Gpu("", ""))


def _index(entry: str, gpus: Sequence[Gpu]) -> int | None:
    """The GPU that `entry` names: by number, by UUID, or by a prefix of one UUID only."""
    if entry.startswith("GPU-"):
        matches = [number for number, gpu in enumerate(gpus) if gpu.uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    if entry.isascii() and entry.isdigit() and int(entry) < len(gpus):
        return int(entry)
    return None


def _bound(driver: Path, root: Path) -> list[str]:
    """PCI addresses of this driver's GPUs that have a node which this process could open, in order."""
    return sorted(
        device.name
        for device in driver.glob("[0-9a-f]*:[0-9a-f]*:[0-9a-f]*.[0-7]")
        if any((root / "dev/dri" / node.name).exists() for node in (device / "drm").glob("renderD*"))
    )


def _count_masked(mask: str, devices: int) -> int:
    """`0,1.0`: devices by number, or a tile of one as a device; entries that name none do not count."""
    entries = {entry.strip() for entry in mask.split(",")}
    known = {entry for entry in entries if _AFFINITY_ENTRY.fullmatch(entry) and int(entry.split(".")[0]) < devices}
    return len({entry.split(".")[0] for entry in known})


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
    """PCI address and UUID of each GPU, in the order of the PCI bus; empty texts for what is unknown.

    Empty without the library (its name or path), or if it does not work.
    """
    return _of_each_gpu(_device, library)


def _of_each_gpu(asked: Callable[[ctypes.CDLL, int], T], library: str) -> list[T]:
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
        return [asked(nvml, number) for number in range(count.value)]
    except AttributeError:  # a library older than these functions
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
    """The health of one GPU: its PCI address and name, and if the driver does not answer for it, why.

    `errors` are memory errors that ECC could not correct, since the driver was loaded; -1 if there is no ECC, or it is
    off. For rows of memory that must be replaced by spare ones: whether that waits for a reset, and whether it has
    failed.
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
    """The health of all GPUs, in the order of the PCI bus; None without the library (its name or path).

    May hang for as long as the driver does.
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
    counted = _asked(nvml, "nvmlDeviceGetTotalEccErrors", *arguments)
    corrected, uncorrected, pending, failed = (ctypes.c_uint() for _ in range(4))
    counts = tuple(map(ctypes.byref, (corrected, uncorrected, pending, failed)))
    if not _asked(nvml, "nvmlDeviceGetRemappedRows", handle, *counts):  # GPUs before Ampere retire pages instead
        _asked(nvml, "nvmlDeviceGetRetiredPagesPendingStatus", handle, ctypes.byref(pending))
    return GpuHealth(
        address,
        name.value.decode(errors="replace"),
        _error(nvml, code),
        errors.value if counted else -1,
        bool(pending.value),
        bool(failed.value),
    )


def _asked(nvml: ctypes.CDLL, function: str, *arguments: object) -> bool:
    """Whether the library, the GPU and its settings know an answer, which is then in the arguments."""
    found = getattr(nvml, function, None)
    return found is not None and found(*arguments) == 0


_COMPLETED = 3
"""The value of `nvmlGpuFabricState_t` of a GPU that is registered with its fabric."""


class _FabricInfo(ctypes.Structure):
    _fields_ = (
        ("cluster", ctypes.c_ubyte * 16),
        ("status", ctypes.c_uint),
        ("clique", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    )


def nvml_fabrics(library: str = LIBRARY) -> list[str]:
    """The NVLink domain and partition of each GPU, in the form of the label `nvidia.com/gpu.clique`: its UUID, a period
    and the clique; empty texts for GPUs that are in none. As `nvml_devices`; may hang for as long as the driver does.
    """
    return _of_each_gpu(_fabric, library)


def _fabric(nvml: ctypes.CDLL, number: int) -> str:
    handle, info = ctypes.c_void_p(), _FabricInfo()
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(number), ctypes.byref(handle)):
        return ""
    known = _asked(nvml, "nvmlDeviceGetGpuFabricInfo", handle, ctypes.byref(info))
    cluster = bytes(info.cluster)
    if not known or info.state != _COMPLETED or info.status or not any(cluster):  # one machine alone has none
        return ""
    from uuid import UUID

    return f"{UUID(bytes=cluster)}.{info.clique}"
