"""Counts the processors, GPUs and XPUs that this process may use, by the kernel and the driver alone.

No GPU framework is loaded: the driver's files under /proc, /dev and /sys list the devices, and CUDA_VISIBLE_DEVICES or
ZE_AFFINITY_MASK selects those that a program would see. The rules of the first are in the CUDA C++ Programming Guide,
section "CUDA Environment Variables", those of the second in the Level Zero specification, section "Environment
Variables". Where the kernel hides the driver's files, NVIDIA's management library is asked (`base.nvml`), which is
imported only then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rallypoint.base.errors import UserError

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
    devices = cards or (addresses if integrated else [])
    mask = environ.get("ZE_AFFINITY_MASK")
    return _count_masked(mask, len(devices)) if mask else len(devices)


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
    by_address = {file.parent.name: dict(_INFORMATION.findall(file.read_text(errors="replace"))) for file in folders}
    nodes = {path.name for path in (root / "dev").glob("nvidia[0-9]*")}
    if by_address:
        # A container may see the whole machine's /proc but have the device nodes of a few GPUs only.
        return [
            Gpu(address, facts.get("GPU UUID", ""))
            for address, facts in by_address.items()
            if not nodes or f"nvidia{facts.get('Device Minor', '')}" in nodes
        ]
    if nodes or (root / "dev/dxg").exists():  # a sandbox that hides the driver's /proc, or Windows's Linux
        return (_gpus_by_nvml() if root == Path("/") else []) or [Gpu("", "")] * len(nodes)
    return []


def _gpus_by_nvml() -> list[Gpu]:
    from rallypoint.base.nvml import nvml_devices

    return [Gpu(address, uuid) for address, uuid in nvml_devices()]


def _visible(visible: str, gpus: Sequence[Gpu]) -> list[Gpu]:
    """As CUDA: the list counts up to the first entry that names no GPU; a GPU named twice makes it void."""
    entries = [entry.strip() for entry in visible.split(",")]
    if entries[0].startswith("MIG-"):  # a CUDA program sees one MIG instance, however many are named
        return [_mig_parent(entries[0], gpus)] if gpus else []
    numbers: list[int] = []
    for entry in entries:
        gpu = _index(entry, gpus)
        if gpu is None:
            break
        if gpu in numbers:
            return []
        numbers.append(gpu)
    return [gpus[number] for number in numbers]


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
