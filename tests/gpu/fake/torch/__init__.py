"""A stand-in for torch on a machine whose GPUs are files: it counts them as CUDA's guide says, and fails as CUDA does.

It proves the plumbing of `tests.gpu` where there is no GPU, and nothing about torch. `FAKE_GPUS` names a
file with the UUID and PCI address of each GPU, a line each.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any, NoReturn

__version__ = "0.0+fake"
version = SimpleNamespace(cuda="0.0")
uint8 = "uint8"


def _gpus() -> list[list[str]]:
    with open(os.environ["FAKE_GPUS"], encoding="utf-8") as file:
        return [line.split() for line in file]


def _visible() -> list[list[str]]:
    """CUDA C++ Programming Guide, section "CUDA Environment Variables"."""
    gpus, given = _gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return gpus
    found: list[list[str]] = []
    for entry in map(str.strip, given.split(",")):
        named = [gpu for gpu in gpus if entry.startswith("GPU-") and gpu[0].startswith(entry)]
        if entry.isdecimal() and int(entry) < len(gpus):
            named = [gpus[int(entry)]]
        if len(named) != 1:
            break
        if named[0] in found:
            return []
        found += named
    return found


def _properties(number: int) -> Any:
    uuid, address = _visible()[number]
    domain, bus, device = (int(part, 16) for part in address.removesuffix(".0").split(":"))
    return SimpleNamespace(
        name="Fake H100",
        uuid=uuid.removeprefix("GPU-"),
        pci_domain_id=domain,
        pci_bus_id=bus,
        pci_device_id=device,
        total_memory=1 << 36,
        major=9,
        minor=0,
    )


_MISTAKES = {
    "assert": ("RuntimeError", "CUDA error: device-side assert triggered"),
    "memory": ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 16.00 GiB."),
}


class OutOfMemoryError(RuntimeError):
    """As torch names it."""


def _fail(*_args: object, **_kwargs: object) -> NoReturn:
    kind, text = _MISTAKES[sys.argv[1]]
    raise {"RuntimeError": RuntimeError, "OutOfMemoryError": OutOfMemoryError}[kind](text)


zeros = tensor = empty = _fail
_C = SimpleNamespace(_cuda_getDeviceCount=lambda: len(_visible()))
cuda = SimpleNamespace(
    is_available=lambda: bool(_visible()),
    device_count=lambda: len(_visible()),
    get_device_properties=_properties,
    nccl=SimpleNamespace(version=lambda: (2, 0, 0)),
    synchronize=_fail,
)
