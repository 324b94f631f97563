"""Counts the processors and accelerators that this process may use, using only the kernel and the drivers.

The table in `base.vendors` lists the makers, how their drivers show devices, and which variables select devices. No
framework is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from rallypoint.base.errors import UserError
from rallypoint.base.light_typing import NamedTuple
from rallypoint.base.vendors import (
    CUDA,
    HIP,
    NVIDIA,
    ROCR,
    VENDORS,
    Device,
    Files,
    Found,
    Vendor,
    by_index,
    by_ranges,
    expanded,
    uncounted,
)

_HIDES_IF_EMPTY = frozenset((CUDA, ROCR))
"""Variables that hide all devices when empty; the others have no effect when empty."""
_HIDING = frozenset(("", "-1", "NoDevFiles", "none", "void"))
"""Values that users and schedulers set to hide all devices."""

Root = str | os.PathLike[str]


def cpu_count() -> int:
    """The number of processors that this process may use, from its cpuset and affinity mask, as in torch."""
    return len(os.sched_getaffinity(0))


class Seen(NamedTuple):
    """One vendor's devices on this machine.

    `devices` are those that a program with the variables would see, in numerical order; `listed` is their number
    without the variables. `variable` selects devices; empty if none is set. `trouble`: why they cannot be counted.
    """

    vendor: Vendor
    devices: Sequence[Device]
    listed: int
    variable: str = ""
    trouble: str = ""


def seen(environ: Mapping[str, str], root: Root = "/", vendors: Iterable[Vendor] = VENDORS) -> list[Seen]:
    """Find this machine's accelerators: one row per vendor whose driver has nodes in /dev, in the table's order.

    Args:
        environ: the variables of the programs that would use the accelerators.
        root: the folder that contains `dev`, `sys` and `proc`.
        vendors: the rows of the table to look for.
    """
    files = Files(root)
    found = ((vendor, vendor.find(files, environ)) for vendor in vendors)
    return [_seen(vendor, here, environ) for vendor, here in found if here.devices or here.trouble]


def counted(number: int, vendor: Vendor) -> str:
    """Format a number of devices for a message: `1 NVIDIA GPU`, `8 Ascend NPUs`."""
    return f"{number} {vendor.devices[:-1] if number == 1 else vendor.devices}"


def best(rows: Iterable[Seen]) -> Seen | None:
    """The devices that a job uses by default: the first that are not integrated in a processor (integrated ones drive
    the display).
    """
    return next((row for row in rows if any(not device.integrated for device in row.devices)), None)


def trouble_of(rows: Iterable[Seen], root: Root = "/") -> tuple[str, str]:
    """The reason why accelerators cannot be counted, and the remedy; empty texts if they can."""
    for row in rows:
        if row.trouble:
            return row.trouble, row.vendor.advice
    return uncounted(Files(root)), ""


def _seen(vendor: Vendor, found: Found, environ: Mapping[str, str]) -> Seen:
    devices, variable = list(found.devices), ""
    for name in filter(None, (vendor.below, _selecting(vendor, environ))):
        if name in environ and (environ[name] or name in _HIDES_IF_EMPTY):
            devices, variable = vendor.select(environ[name], devices), name
    trouble = found.trouble
    if found.devices and not devices and environ[variable] not in _HIDING:
        trouble = f"{variable}={environ[variable]!r} names none of the {len(found.devices)} {vendor.devices} here"
    return Seen(vendor, devices, len(found.devices), variable, trouble)


def _selecting(vendor: Vendor, environ: Mapping[str, str]) -> str:
    """The variable that selects devices; empty if none is set."""
    given = (name for name in vendor.variables if environ.get(name) or (name in environ and name in _HIDES_IF_EMPTY))
    return next(given, "")


def cuda_count(environ: Mapping[str, str], root: Root = "/") -> int:
    """The number of `cuda_devices`; 0 without an NVIDIA driver."""
    return len(cuda_devices(environ, root))


def cuda_devices(environ: Mapping[str, str], root: Root = "/") -> list[Device]:
    """The NVIDIA GPUs that a program with the variables `environ` would see, in numerical order.

    Without CUDA_VISIBLE_DEVICES, this is the order on the PCI bus. A MIG instance's GPU is known only from the
    instance's name.
    """
    return [device for row in seen(environ, root, (NVIDIA,)) for device in row.devices]


def one_device_per_worker(environ: Mapping[str, str], workers: int, root: Root = "/") -> list[dict[str, str]]:
    """The variables for each of `workers` workers, so that each sees one device (contract section 1.8). Raises
    UserError if the variable in `environ` lists fewer devices than there are workers.
    """
    vendor, devices = _of_workers(environ, root)
    source = _selecting(vendor, environ)
    if vendor is NVIDIA and environ.get(HIP):
        source = HIP  # as in torch, which does not check the vendor
    names = {*vendor.per_worker, *filter(None, (source,))}
    source = source or (vendor.below if environ.get(vendor.below) else "")
    entries = _entries(environ[source], vendor) if source else _numbers(devices, workers, vendor)
    if len(entries) < workers:
        raise UserError(
            f"with virtual local ranks, each worker needs its own device from {source}={environ[source]!r}, which "
            f"lists {len(entries)} for {workers} worker{'' if workers == 1 else 's'}; list more devices, or start "
            "fewer workers"
        )
    if source and source == vendor.below:
        entries = _numbers((), workers, vendor)  # among the devices that the variable leaves
    return [dict.fromkeys(names, entry) for entry in entries[:workers]]


def _entries(text: str, vendor: Vendor) -> list[str]:
    return expanded(text) if vendor.select is by_ranges else [entry.strip() for entry in text.split(",")]


def _numbers(devices: Sequence[Device], workers: int, vendor: Vendor) -> list[str]:
    """The devices as the variables list them: by position, unless the driver numbers devices."""
    if vendor.select is by_index and len(devices) >= workers:
        return [str(device.number) for device in devices]
    return [str(number) for number in range(workers)]


def _of_workers(environ: Mapping[str, str], root: Root) -> tuple[Vendor, Sequence[Device]]:
    """The vendor whose devices workers get: the first vendor here whose variable is set, or else the first one."""
    rows = _all_here(os.fspath(root))
    given = [row for row in rows if _is_selected(row.vendor, environ)]
    if rows:
        row = (given or rows)[0]
        return row.vendor, row.devices
    return next((vendor for vendor in VENDORS if _is_selected(vendor, environ)), NVIDIA), ()


@cache
def _all_here(root: str) -> list[Seen]:
    """The rows for devices that a job can use, ignoring variables. Cached, since each worker's variables need them."""
    return [row for row in seen({}, root) if best([row])]


def _is_selected(vendor: Vendor, environ: Mapping[str, str]) -> bool:
    return bool(_selecting(vendor, environ) or environ.get(vendor.below))
