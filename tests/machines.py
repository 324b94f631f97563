"""Machines as the kernel and the drivers of accelerators show them: folders with `dev`, `sys` and `proc`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

UUIDS = ["GPU-aaaa1111-0000", "GPU-aabb2222-0000", "GPU-cccc3333-0000"]


def node(root: Path, name: str) -> None:
    """A node in /dev, that may be opened."""
    (root / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
    (root / "dev" / name).touch()


def text(root: Path, name: str, content: object) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(f"{content}\n")


def link(root: Path, name: str, target: str) -> None:
    """A symbolic link to a folder of /sys, which is made."""
    (root / target).mkdir(parents=True, exist_ok=True)
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    os.symlink(root / target, root / name)


def nvidia(root: Path, minors: Iterable[int], nodes: Iterable[int]) -> Path:
    """GPUs of NVIDIA with these device minors."""
    for minor in minors:
        information = f"Model: \t\t NVIDIA H100\nIRQ:   \t\t 183\nGPU UUID: \t {UUIDS[minor]}\nDevice Minor: \t {minor}"
        text(root, f"proc/driver/nvidia/gpus/0000:{minor:02x}:00.0/information", information)
    (root / "dev").mkdir(parents=True, exist_ok=True)
    for name in [f"nvidia{number}" for number in nodes]:
        node(root, name)
    return root


def intel(root: Path, addresses: Iterable[str], nodes: Iterable[str], driver: str = "xe", tiles: int = 0) -> Path:
    """Intel GPUs at these addresses, the first of which is `renderD128`; tiles are the driver's `tile0` and so on."""
    folder = root / f"sys/bus/pci/drivers/{driver}"
    for number, address in enumerate(addresses):
        (folder / address / f"drm/card{number}").mkdir(parents=True)
        (folder / address / f"drm/renderD{128 + number}").mkdir()
        for tile in range(tiles):
            (folder / address / f"tile{tile}").mkdir()
    (folder / "module").mkdir(parents=True)
    (root / "dev/dri").mkdir(parents=True)
    for name in nodes:
        node(root, f"dri/{name}")
    return root


MI300, APU = 90402, 110003
"""`gfx_target_version` of a card and of a GPU in a notebook's processor."""


def amd(root: Path, gpus: Iterable[int], nodes: Iterable[int], refused: Iterable[int] = ()) -> Path:
    """AMD GPUs by their `gfx_target_version`, after one node of processors; GPU n is `renderD{128 + n}`.

    `nodes` are those that are in /dev/dri; the kernel shows no properties of those `refused`.
    """
    folder = "sys/class/kfd/kfd/topology/nodes"
    node(root, "kfd")
    text(root, f"{folder}/0/properties", "cpu_cores_count 96\nsimd_count 0\ndrm_render_minor 0")
    for number, version in enumerate(gpus):
        facts = {
            "cpu_cores_count": 0,
            "simd_count": 1216,
            "gfx_target_version": version,
            "location_id": (number + 1) << 8,
            "domain": 0,
            "drm_render_minor": 128 + number,
            "unique_id": 0xAB00 + number,
        }
        shown = "" if number in refused else "\n".join(f"{name} {value}" for name, value in facts.items())
        text(root, f"{folder}/{number + 1}/properties", shown)
    for number in nodes:
        node(root, f"dri/renderD{128 + number}")
    return root


def accel(root: Path, drivers: Iterable[str], modules: Mapping[int, int] | None = None) -> Path:
    """Nodes of Linux's subsystem for accelerators, one for each of these drivers."""
    for number, driver in enumerate(drivers):
        node(root, f"accel/accel{number}")
        device = f"sys/devices/pci0000:00/0000:{number + 0x10:02x}:00.0"
        link(root, f"sys/class/accel/accel{number}/device", device)
        link(root, f"{device}/driver", f"sys/bus/pci/drivers/{driver}")
        if modules:
            text(root, f"{device}/module_id", modules[number])
    return root


def neuron(root: Path, names: Iterable[str], cores: int) -> Path:
    """Devices of AWS Neuron of these names, with so many physical cores each."""
    for number, name in enumerate(names):
        node(root, f"neuron{number}")
        folder = f"sys/devices/virtual/neuron_device/neuron{number}"
        text(root, f"{folder}/core_count", cores)
        text(root, f"{folder}/info/architecture/device_name", name)
    return root


def tpu(root: Path, kinds: Iterable[str], nodes: Iterable[int]) -> Path:
    """TPU chips of these PCI ids, each in the group of VFIO of its number; `nodes` are the groups in /dev/vfio."""
    node(root, "vfio/vfio")
    for number, kind in enumerate(kinds):
        device = f"sys/bus/pci/devices/0000:00:{number + 4:02x}.0"
        text(root, f"{device}/vendor", "0x1ae0")
        text(root, f"{device}/device", kind)
        link(root, f"{device}/iommu_group", f"sys/kernel/iommu_groups/{number}")
    for number in nodes:
        node(root, f"vfio/{number}")
    return root


def metax(root: Path, gpus: int) -> Path:
    """MetaX GPUs, beside one render node of another maker."""
    node(root, "mxcd")
    for number in range(gpus + 1):
        node(root, f"dri/renderD{128 + number}")
        device = f"sys/devices/pci0000:00/0000:{number + 0x20:02x}:00.0"
        link(root, f"sys/class/drm/renderD{128 + number}/device", device)
        text(root, f"{device}/vendor", "0x9999" if number < gpus else "0x1a03")
    return root
