"""NVIDIA's management library, for machines whose kernel hides the driver's files. Loaded only when needed."""

from __future__ import annotations

import ctypes

LIBRARY = "libnvidia-ml.so.1"

_MAX_UUID = 96


class _PciInfo(ctypes.Structure):
    """`nvmlPciInfo_t` of the third version."""

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
        return [_device(nvml, number) for number in range(count.value)]
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
