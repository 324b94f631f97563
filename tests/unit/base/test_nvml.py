"""NVIDIA's management library, by a stand-in in C that a test compiles."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from rallypoint.base.nvml import nvml_devices

_LIBRARY = """
#include <string.h>
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char address[32]; };
int nvmlInit_v2(void) { return BROKEN; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned n, void **handle) { *handle = (void *)(long)(n + 1); return 0; }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
    strncpy(text, (long)handle == 1 ? "GPU-one" : "GPU-two", size);
    return 0;
}
int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *info) {
    if ((long)handle == 2) return 3;
    info->domain = 1; info->bus = 0xab; info->device = 0; memset(info->address, 'x', sizeof info->address);
    return 0;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for a stand-in of the library")
@pytest.mark.parametrize(("broken", "found"), [(0, [("0001:ab:00.0", "GPU-one"), ("", "GPU-two")]), (9, [])])
@pytest.mark.process
def test_the_management_library(tmp_path: Path, broken: int, found: list[tuple[str, str]]) -> None:
    library = tmp_path / "libnvidia-ml.so.1"
    command = ["cc", "-shared", "-fPIC", f"-DBROKEN={broken}", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=_LIBRARY, text=True, check=True)
    assert nvml_devices(str(library)) == found


def test_no_management_library(tmp_path: Path) -> None:
    assert nvml_devices(str(tmp_path / "none.so")) == []
