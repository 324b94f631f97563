"""The makers of accelerators: how their drivers show devices, and which variables select devices; see the table
`VENDORS`.

No framework is loaded. Information comes from the drivers' files below /dev, /sys and /proc; each row states the source
of its names. NVIDIA's rows were checked on its GPUs; all others follow the drivers' and vendors' documents.

Laws:

1. A device counts if this process may open its node in /dev. /sys and /proc alone prove nothing, since a container sees
   those of the whole machine.
2. If a driver has nodes in /dev but its devices cannot be counted, report this (`Found.trouble`). Callers must not take
   it for "no device".
3. The variables of a row are those that the device's runtime reads in a worker. Variables that only a container runtime
   reads (NVIDIA_VISIBLE_DEVICES, ASCEND_VISIBLE_DEVICES, HABANA_VISIBLE_DEVICES) have already determined /dev's nodes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from rallypoint.base.light_typing import NamedTuple
from rallypoint.base.procfs import read_text


class Device(NamedTuple):
    """One device: its PCI address (`0000:07:00.0`) and UUID, each empty if unknown.

    `number` is the one in the vendor's lists; `integrated` marks a GPU in a processor.
    """

    address: str = ""
    uuid: str = ""
    number: int = -1
    integrated: bool = False


class Found(NamedTuple):
    """The devices that this process may open, in numerical order, or why they cannot be counted."""

    devices: Sequence[Device] = ()
    trouble: str = ""


class Files:
    """The files below a folder with `dev`, `sys` and `proc`: `/`, or a fake machine. Unreadable files are empty."""

    def __init__(self, root: str | os.PathLike[str] = "/") -> None:
        self.root = os.fspath(root)
        self.dev = frozenset(self.names("dev"))

    def path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(self.path(folder)))
        except OSError:
            return []

    def text(self, name: str) -> str:
        return read_text(self.path(name)).strip()

    def link(self, name: str) -> str:
        """The last part of a symbolic link's target: for `device` the PCI address, for `driver` the driver."""
        return os.path.basename(os.path.realpath(self.path(name))) if os.path.islink(self.path(name)) else ""

    def exists(self, name: str) -> bool:
        return os.path.exists(self.path(name))

    def can_open(self, node: str) -> bool:
        return os.access(self.path(node), os.R_OK | os.W_OK)

    def numbered(self, folder: str, pattern: str) -> list[int]:
        """The numbers in matching names of `folder`: `davinci([0-9]+)`."""
        names = self.dev if folder == "dev" else self.names(folder)
        return sorted(int(match[1]) for match in map(re.compile(pattern).fullmatch, names) if match)


Selection = Callable[[str, Sequence[Device]], list[Device]]
Finder = Callable[[Files, Mapping[str, str]], Found]


class Vendor(NamedTuple):
    """A row of the table.

    Args:
        name: the maker, for messages.
        devices: the plural of its devices, for messages.
        kind: torch's name for the device, which `--nproc-per-node` accepts.
        find: reads the driver's files.
        variables: the variables that select devices; the first one that is set decides.
        per_worker: additional variables that assign a worker its own device.
        select: the devices that a list names, in the list's order.
        advice: the remedy if no device can be opened.
        below: a variable that a lower layer applies first; `variables` select among the remaining devices.
    """

    name: str
    devices: str
    kind: str
    find: Finder
    variables: tuple[str, ...]
    per_worker: tuple[str, ...]
    select: Selection
    advice: str
    below: str = ""


# Lists of devices


def by_cuda(text: str, devices: Sequence[Device]) -> list[Device]:
    """Read a list like CUDA: up to the first entry that is not a GPU. A GPU that is listed twice makes the list void.

    See the CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    entries = [entry.strip() for entry in text.split(",")]
    if entries[0].startswith("MIG-"):  # a CUDA program sees only one MIG instance from the list
        return [_mig_parent(entries[0], devices)] if devices else []
    chosen = _chosen(entries, devices)
    return chosen if len(set(chosen)) == len(chosen) else []


def _mig_parent(entry: str, gpus: Sequence[Device]) -> Device:
    """The GPU in `MIG-<GPU-UUID>/<instance>/<instance>`; newer names contain no GPU."""
    uuid = entry.removeprefix("MIG-").partition("/")[0]
    return next((gpu for gpu in gpus if gpu.uuid and gpu.uuid == uuid), gpus[0] if len(gpus) == 1 else Device())


def by_list(text: str, devices: Sequence[Device]) -> list[Device]:
    """Numbers or UUIDs, up to the first entry that is not a device; a device that is listed twice counts once."""
    return list(dict.fromkeys(_chosen([entry.strip() for entry in text.split(",")], devices)))


def _chosen(entries: Iterable[str], devices: Sequence[Device]) -> list[Device]:
    chosen = []
    for entry in entries:
        device = _named(entry, devices)
        if device is None:
            break
        chosen.append(device)
    return chosen


def _named(entry: str, devices: Sequence[Device]) -> Device | None:
    """The device that `entry` names: by position, UUID, or a prefix of exactly one UUID."""
    if entry.startswith("GPU-"):
        matches = [device for device in devices if device.uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    if entry.isascii() and entry.isdigit() and int(entry) < len(devices):
        return devices[int(entry)]
    return None


def by_strict_list(text: str, devices: Sequence[Device]) -> list[Device]:
    """Parse numbers without blanks, up to the first other entry (CANN, "ASCEND_RT_VISIBLE_DEVICES")."""
    entries = text.split(",")
    return by_list(",".join(entry if entry == entry.strip() else "-" for entry in entries), devices)


def by_index(text: str, devices: Sequence[Device]) -> list[Device]:
    """The driver's numbers (module ids), in any order; unknown ones are ignored."""
    by_number = {device.number: device for device in devices}
    wanted = [int(entry) for entry in map(str.strip, text.split(",")) if entry.isascii() and entry.isdigit()]
    return [by_number[number] for number in dict.fromkeys(wanted) if number in by_number]


def by_ranges(text: str, devices: Sequence[Device]) -> list[Device]:
    """Ranges such as `0-3,8`, as Neuron's runtime reads them."""
    return by_list(",".join(expanded(text)), devices)


def expanded(text: str) -> list[str]:
    """Expand `0-2,8` to `0`, `1`, `2`, `8`. Other entries stay unchanged."""
    entries: list[str] = []
    for entry in map(str.strip, text.split(",")):
        first, _, last = entry.partition("-")
        if first.isdigit() and last.isdigit() and int(first) <= int(last) < int(first) + _MOST:
            entries += map(str, range(int(first), int(last) + 1))
        else:
            entries.append(entry)
    return entries


_MOST = 1 << 10


def by_affinity(text: str, devices: Sequence[Device]) -> list[Device]:
    """Devices or single tiles such as `0,1.0` (Level Zero, "Affinity Mask"). An empty mask hides no device."""
    entries = [entry.strip() for entry in text.split(",")]
    numbers = [int(entry.split(".")[0]) for entry in entries if _AFFINITY_ENTRY.fullmatch(entry)]
    known = dict.fromkeys(number for number in numbers if number < len(devices))
    return [devices[number] for number in known] if text else list(devices)


_AFFINITY_ENTRY = re.compile(r"[0-9]+(\.[0-9]+)?")


# NVIDIA


def _nvidia(files: Files, _environ: Mapping[str, str]) -> Found:
    """Reads /proc/driver/nvidia/gpus and the device nodes; if the kernel hides the folder, NVML (`base.nvml`)."""
    nodes = {f"nvidia{number}" for number in files.numbered("dev", r"nvidia([0-9]+)")}
    folder = "proc/driver/nvidia/gpus"
    by_address = {
        name: dict(_INFORMATION.findall(files.text(f"{folder}/{name}/information"))) for name in files.names(folder)
    }
    if by_address:
        # A container may see the whole machine's /proc, but have device nodes of only a few GPUs.
        return Found(
            _in_order(
                Device(address, facts.get("GPU UUID", ""))
                for address, facts in by_address.items()
                if not nodes or f"nvidia{facts.get('Device Minor', '')}" in nodes
            )
        )
    if nodes or "dxg" in files.dev:  # a sandbox that hides the driver's /proc, or Linux on Windows
        return Found(_in_order((_by_nvml() if files.root == "/" else []) or [Device()] * len(nodes)))
    if not files.dev.isdisjoint(("nvgpu", "nvhost-gpu")):  # Jetson: a single GPU, integrated in the processor
        return Found([Device(number=0)])
    trouble = "NVIDIA's driver is loaded (/dev/nvidiactl) but lists no GPU"
    return Found(trouble=trouble) if "nvidiactl" in files.dev else Found()


def _in_order(devices: Iterable[Device]) -> list[Device]:
    return [device._replace(number=number) for number, device in enumerate(devices)]


_INFORMATION = re.compile(r"^([^:\n]+?)[ \t]*:[ \t]*(.*?)[ \t]*$", re.MULTILINE)


def _by_nvml() -> list[Device]:
    from rallypoint.base.nvml import nvml_devices

    return [Device(address, uuid) for address, uuid in nvml_devices()]


# AMD, and Hygon, whose driver is derived from AMD's

KFD_NODES = "sys/class/kfd/kfd/topology/nodes"
_APUS = frozenset((90002, 90009, 90012, 100103, 100303, 100305, 100306, 110003, *range(110500, 110600)))
"""`gfx_target_version` of GPUs integrated in processors for desktops and notebooks: those that LLVM's "User Guide for
AMDGPU Backend" lists as APU only (gfx902, gfx909, gfx90c, gfx1013, gfx1033, gfx1035, gfx1036, gfx1103, gfx115x)."""


def _amd(files: Files, _environ: Mapping[str, str]) -> Found:
    """KFD's compute nodes, which HIP numbers in this order (Linux, drivers/gpu/drm/amd/amdkfd/kfd_topology.c).

    The kernel hides `properties` of a GPU that a container's device cgroup does not allow.
    """
    if "kfd" not in files.dev:
        return Found()
    nodes = files.numbered(KFD_NODES, r"([0-9]+)")
    if not nodes:
        return Found(trouble="AMD's driver is loaded (/dev/kfd) but /sys/class/kfd is not visible here")
    devices: list[Device] = []
    hidden = 0
    for node in nodes:
        lines = files.text(f"{KFD_NODES}/{node}/properties").splitlines()
        facts = {name: int(number) for name, _, number in (line.partition(" ") for line in lines) if number.isdigit()}
        if facts and not facts.get("simd_count"):
            continue  # processors
        if facts and files.can_open(f"dev/dri/renderD{facts.get('drm_render_minor', 0)}"):
            devices.append(_kfd_device(facts))
        else:
            hidden += 1
    if devices or not hidden:
        return Found(_in_order(devices))
    return Found(trouble=f"AMD's driver is loaded (/dev/kfd) but this process may not open any of its {hidden} GPUs")


def _kfd_device(facts: Mapping[str, int]) -> Device:
    place = facts.get("location_id", 0)
    address = f"{facts.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
    unique = facts.get("unique_id", 0)
    return Device(address, f"GPU-{unique:016x}" if unique else "", integrated=facts.get("gfx_target_version") in _APUS)


# Intel's GPUs

_INTEGRATED = re.compile(r"[0-9a-f]{4}:00:[0-9a-f]{2}\.[0-7]")


def _intel(files: Files, environ: Mapping[str, str]) -> Found:
    """GPUs on cards, or otherwise the integrated one, as torch counts them.

    Each tile of a card is a device (`tile0` with the driver xe, `gt0` with i915), unless ZE_FLAT_DEVICE_HIERARCHY is
    COMPOSITE (Level Zero, "Environment Variables").
    """
    cards: list[Device] = []
    integrated: list[Device] = []
    hidden = 0
    for driver in ("i915", "xe"):
        folder = f"sys/bus/pci/drivers/{driver}"
        for address in filter(_PCI.fullmatch, files.names(folder)):
            nodes = [name for name in files.names(f"{folder}/{address}/drm") if name.startswith("renderD")]
            given = [name for name in nodes if files.exists(f"dev/dri/{name}")]
            if not any(files.can_open(f"dev/dri/{name}") for name in given):
                hidden += bool(given) and not _INTEGRATED.fullmatch(address)
            elif _INTEGRATED.fullmatch(address):
                integrated.append(Device(address, integrated=True))
            else:
                flat = environ.get("ZE_FLAT_DEVICE_HIERARCHY", "").upper() != "COMPOSITE"
                cards += [Device(address)] * (_tiles(files, f"{folder}/{address}") if flat else 1)
    trouble = f"this process may not open any of the {hidden} Intel GPUs" if hidden and not cards else ""
    return Found(_in_order(cards or integrated), trouble)


_PCI = re.compile(r"[0-9a-f]+:[0-9a-f]+:[0-9a-f]+\.[0-7]")


def _tiles(files: Files, device: str) -> int:
    tiles = len(files.numbered(device, r"tile([0-9]+)"))
    cards = [name for name in files.names(f"{device}/drm") if name.startswith("card")]
    return max(1, tiles, *(len(files.numbered(f"{device}/drm/{card}/gt", r"gt([0-9]+)")) for card in cards))


# Accelerators with their own device nodes


def _numbered(pattern: str, maker: str) -> Finder:
    """Devices are the nodes in /dev with matching names. Their PCI addresses are unknown."""
    name = re.compile(pattern)

    def find(files: Files, _environ: Mapping[str, str]) -> Found:
        nodes = {int(match[1]): match[0] for match in map(name.fullmatch, files.dev) if match}
        devices = [Device(number=number) for number in sorted(nodes) if files.can_open(f"dev/{nodes[number]}")]
        if nodes and not devices:
            return Found(
                trouble=f"this process may not open any of the {len(nodes)} {maker} devices (/dev/{nodes[min(nodes)]})"
            )
        return Found(devices)

    return find


def _metax(files: Files, _environ: Mapping[str, str]) -> Found:
    """Render nodes with MetaX's PCI vendor id, next to /dev/mxcd (its images run with --device for both)."""
    if "mxcd" not in files.dev:
        return Found()
    devices = []
    for number in files.numbered("dev/dri", r"renderD([0-9]+)"):
        device = f"sys/class/drm/renderD{number}/device"
        if files.text(f"{device}/vendor") == "0x9999" and files.can_open(f"dev/dri/renderD{number}"):
            devices.append(Device(files.link(device)))
    return Found(
        _in_order(sorted(devices)),
        ""
        if devices
        else "MetaX's driver is loaded (/dev/mxcd) but this process may not open any of its GPUs in /dev/dri",
    )


_ACCEL = r"accel([0-9]+)"
_IN_PROCESSORS = frozenset(("intel_vpu", "amdxdna", "rocket", "ethosu"))
"""Linux drivers for inference units in processors of notebooks and boards. Torch does not train on these."""


def _accel_nodes(files: Files) -> dict[int, str]:
    """The number of each node of Linux's accelerator subsystem (/dev/accel/accelN), and its driver."""
    numbers = files.numbered("dev/accel", _ACCEL) if "accel" in files.dev else []
    drivers = {number: files.link(f"sys/class/accel/accel{number}/device/driver") for number in numbers}
    return {number: driver for number, driver in drivers.items() if driver not in _IN_PROCESSORS}


def _gaudi(files: Files, _environ: Mapping[str, str]) -> Found:
    """Nodes /dev/accel/accelN of the driver habanalabs, by module id (docs.habana.ai, "Multiple Tenants")."""
    devices = []
    hidden = 0
    for number, driver in _accel_nodes(files).items():
        if driver != "habanalabs":
            continue
        if not files.can_open(f"dev/accel/accel{number}"):
            hidden += 1
            continue
        folder = f"sys/class/accel/accel{number}/device"
        module = files.text(f"{folder}/module_id")
        devices.append(Device(files.link(folder), number=int(module) if module.isdigit() else number))
    devices.sort(key=lambda device: device.number)
    trouble = (
        f"this process may not open any of the {hidden} Gaudi accelerators (/dev/accel)"
        if hidden and not devices
        else ""
    )
    return Found(devices, trouble)


_NEURON = "sys/devices/virtual/neuron_device"
_ONE_CORE = frozenset(("Inferentia", "Inferentia2", "Trainium1"))
_TWO_CORES = frozenset(("Trainium2", "Trainium3"))
"""Default number of physical cores per logical one, by device name (awsdocs-neuron, "Logical NeuronCore")."""


def _neuron(files: Files, environ: Mapping[str, str]) -> Found:
    """Logical cores, which are torch's devices: `core_count` of each /dev/neuronN (awsdocs-neuron, "Neuron Sysfs User
    Guide"), divided by the number of physical cores per logical one.
    """
    cores = 0
    numbers = [number for number in files.numbered("dev", r"neuron([0-9]+)") if files.can_open(f"dev/neuron{number}")]
    for number in numbers:
        count = files.text(f"{_NEURON}/neuron{number}/core_count")
        name = files.text(f"{_NEURON}/neuron{number}/info/architecture/device_name")
        asked = environ.get("NEURON_LOGICAL_NC_CONFIG") or environ.get("NEURON_RT_VIRTUAL_CORE_SIZE") or ""
        size = int(asked) if asked.isdigit() else 1 if name in _ONE_CORE else 2 if name in _TWO_CORES else 0
        if not count.isdigit() or not size:
            return Found(trouble=f"the Neuron driver does not report how many logical cores /dev/neuron{number} has")
        cores += int(count) // size
    if not numbers and files.numbered("dev", r"neuron([0-9]+)"):
        return Found(trouble="this process may not open any of the AWS Neuron devices (/dev/neuron0)")
    return Found([Device(number=core) for core in range(cores)])


_TPUS = frozenset(("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f"))
_TPU_OF_TWO = "0x0076"
"""PCI device ids of chips v2 to v6e, and of v7, which programs see as two devices (JAX, hardware_utils.py)."""


def _tpu(files: Files, _environ: Mapping[str, str]) -> Found:
    """/dev/accelN, or each chip's VFIO group: /dev/vfio/GROUP."""
    nodes = files.numbered("dev", _ACCEL)
    if nodes:
        links = [f"sys/class/accel/accel{number}/device" for number in nodes]
        devices = [
            Device(files.link(link), number=number)
            for number, link in zip(nodes, links, strict=True)
            if files.can_open(f"dev/accel{number}")
        ]
        return Found(
            devices, "" if devices else f"this process may not open any of the {len(nodes)} TPU chips (/dev/accel0)"
        )
    if "vfio" not in files.dev:
        return Found()
    chips: list[Device] = []
    hidden = 0
    for address in files.names("sys/bus/pci/devices"):
        device = f"sys/bus/pci/devices/{address}"
        kind = files.text(f"{device}/device") if files.text(f"{device}/vendor") == "0x1ae0" else ""
        group = f"dev/vfio/{files.link(f'{device}/iommu_group')}"
        if (kind not in _TPUS and kind != _TPU_OF_TWO) or not files.exists(group):
            continue
        if kind == _TPU_OF_TWO:
            return Found(trouble="a TPU v7 chip can count as one or two devices")
        if files.can_open(group):
            chips.append(Device(address, number=len(chips)))
        else:
            hidden += 1
    return Found(
        chips, f"this process may not open any of the {hidden} TPU chips (/dev/vfio)" if hidden and not chips else ""
    )


# Drivers of which only the device nodes are known

_UNCOUNTED = {
    "Enflame": r"gcu[0-9]+",
    "Kunlunxin": r"xpuctrl",
    "T-Head": r"alixpu_ctl",
    "Tenstorrent": r"tenstorrent",
    "Habana (a driver of before Linux 6.2)": r"hl[0-9]+",
    "Hygon": r"mkfd",
}
"""Makers, and the names of their drivers' nodes in /dev (from `docker run --device` for their images)."""


def uncounted(files: Files) -> str:
    """Describe an accelerator that no row counts; empty if none is found."""
    for maker, pattern in _UNCOUNTED.items():
        node = next(filter(re.compile(pattern).fullmatch, sorted(files.dev)), "")
        if node and not (node == "mkfd" and "kfd" in files.dev):
            return f"/dev/{node} belongs to a driver of {maker}, whose devices are not counted"
    for number, driver in _accel_nodes(files).items():
        if driver != "habanalabs":
            owner = f"the driver {driver}" if driver else "an unknown driver"
            return f"/dev/accel/accel{number} belongs to {owner}, whose devices are not counted"
    return ""


# The table

CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"
_GROUPS = "add this user to the groups render and video, or pass the container /dev/dri"

NVIDIA = Vendor(
    *("NVIDIA", "NVIDIA GPUs", "cuda", _nvidia, (CUDA,), (CUDA,), by_cuda),
    "check `nvidia-smi`; in a container, check that it was started with --gpus all",
)
AMD = Vendor(  # ROCm, "GPU isolation techniques"
    *("AMD", "AMD GPUs", "cuda", _amd, (HIP, CUDA), (HIP, CUDA), by_list, f"{_GROUPS} and /dev/kfd", ROCR),
)
METAX = Vendor(  # torch for MetaX calls them cuda; the second variable serves programs written for CUDA
    *("MetaX", "MetaX GPUs", "cuda", _metax, ("MACA_VISIBLE_DEVICES", CUDA), ("MACA_VISIBLE_DEVICES", CUDA), by_list),
    f"check `mx-smi`; {_GROUPS} and /dev/mxcd",
)
ILUVATAR = Vendor(
    *("Iluvatar", "Iluvatar GPUs", "cuda", _numbered(r"iluvatar([0-9]+)", "Iluvatar"), (CUDA,), (CUDA,), by_list),
    "check `ixsmi`; pass the container /dev/iluvatar*",
)
ASCEND = Vendor(
    *("Ascend", "Ascend NPUs", "npu", _numbered(r"davinci([0-9]+)", "Ascend")),
    *(("ASCEND_RT_VISIBLE_DEVICES",), ("ASCEND_RT_VISIBLE_DEVICES",), by_strict_list),
    "check `npu-smi info`; pass the container /dev/davinci* and /dev/davinci_manager",
)
GAUDI = Vendor(
    *("Gaudi", "Gaudi accelerators", "hpu", _gaudi, ("HABANA_VISIBLE_MODULES",), ("HABANA_VISIBLE_MODULES",), by_index),
    "check `hl-smi`; start the container with HABANA_VISIBLE_DEVICES=all",
)
NEURON = Vendor(
    *("AWS Neuron", "NeuronCores", "neuron", _neuron, ("NEURON_RT_VISIBLE_CORES",), ("NEURON_RT_VISIBLE_CORES",)),
    *(by_ranges, "check `neuron-ls`; pass the container /dev/neuron*"),
)
TPU = Vendor(  # libtpu prefers the first, unless it is empty
    *("TPU", "TPU chips", "tpu", _tpu, ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"), ("TPU_VISIBLE_CHIPS",), by_list),
    "pass the container /dev/accel* or /dev/vfio",
)
MOORE_THREADS = Vendor(
    *("Moore Threads", "Moore Threads GPUs", "musa", _numbered(r"mtgpu\.?([0-9]+)", "Moore Threads")),
    *(("MUSA_VISIBLE_DEVICES",), ("MUSA_VISIBLE_DEVICES",), by_list),
    "check `mthreads-gmi`; pass the container /dev/mtgpu.* and /dev/dri",
)
CAMBRICON = Vendor(
    *("Cambricon", "Cambricon MLUs", "mlu", _numbered(r"cambricon_dev([0-9]+)", "Cambricon")),
    *(("MLU_VISIBLE_DEVICES",), ("MLU_VISIBLE_DEVICES",), by_list),
    "check `cnmon`; pass the container /dev/cambricon_dev* and /dev/cambricon_ctl",
)
INTEL = Vendor(
    *("Intel", "Intel GPUs", "xpu", _intel, ("ZE_AFFINITY_MASK",), ("ZE_AFFINITY_MASK",), by_affinity, _GROUPS),
)

VENDORS = (NVIDIA, AMD, METAX, ILUVATAR, ASCEND, GAUDI, NEURON, TPU, MOORE_THREADS, CAMBRICON, INTEL)
"""In the order of `auto`: Intel is last, since its cards might only drive the display."""
