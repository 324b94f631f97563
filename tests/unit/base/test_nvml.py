"""NVIDIA's management library, with a stand-in in C."""

from __future__ import annotations

from pathlib import Path

import pytest

from rallypoint.base.nvml import (
    MOST_PROCESSES,
    GpuMemory,
    GpuProcess,
    NvmlHealth,
    nvml_devices,
    nvml_health,
    nvml_kept_open,
    nvml_memory,
)
from tests.nvml import StandIn, compiled, needs_compiler

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


@needs_compiler
@pytest.mark.parametrize(("broken", "found"), [(0, [("0001:ab:00.0", "GPU-one"), ("", "GPU-two")]), (9, [])])
@pytest.mark.process
def test_devices(tmp_path: Path, broken: int, found: list[tuple[str, str]]) -> None:
    assert nvml_devices(compiled(tmp_path, _LIBRARY, f"-DBROKEN={broken}")) == found


def test_no_library(tmp_path: Path) -> None:
    assert nvml_devices(str(tmp_path / "none.so")) == []
    assert nvml_memory(str(tmp_path / "none.so")) == []
    with nvml_kept_open(str(tmp_path / "none.so")) as works:
        assert not works


GIB = 1 << 30


@needs_compiler
@pytest.mark.process
def test_memory(tmp_path: Path) -> None:
    nvml = StandIn(tmp_path)
    nvml.answer(f"{80 * GIB} {62 * GIB} 7:{61 * GIB} 8:? 9:1 9:2 9:?", f"{80 * GIB} 5", f"- - 7:{GIB}", "80 61 -")
    with nvml_kept_open(nvml.library) as works:
        assert works
        assert nvml_memory(nvml.library) == [
            GpuMemory("0000:01:00.0", "GPU-0", 80 * GIB, 62 * GIB, (GpuProcess(7, 61 * GIB), _unknown(8), _unknown(9))),
            GpuMemory("0000:02:00.0", "GPU-1", 80 * GIB, 5, ()),
            GpuMemory("0000:03:00.0", "GPU-2", None, None, (GpuProcess(7, GIB),)),
            GpuMemory("0000:04:00.0", "GPU-3", 80, 61, None),
        ]


def _unknown(pid: int) -> GpuProcess:
    return GpuProcess(pid, None)


@needs_compiler
@pytest.mark.process
@pytest.mark.parametrize("count", [64, 65, 300, MOST_PROCESSES + 1])
def test_many_processes(tmp_path: Path, count: int) -> None:
    nvml = StandIn(tmp_path)
    nvml.answer("9 9 " + " ".join(f"{pid}:1" for pid in range(1, count + 1)))
    (found,) = nvml_memory(nvml.library)
    if count > MOST_PROCESSES:
        assert found.processes is None
    else:
        assert found.processes == tuple(GpuProcess(pid, 1) for pid in range(1, count + 1))


@needs_compiler
@pytest.mark.process
def test_old_libraries(tmp_path: Path) -> None:
    nvml = StandIn(tmp_path, ["-DOLD"])
    nvml.answer("80 61 7:61")
    assert nvml_memory(nvml.library) == [GpuMemory("0000:01:00.0", "GPU-0")]
    assert nvml_health(nvml.library) is None, "without error texts"
    other = tmp_path / "other"
    other.mkdir()
    nvml = StandIn(other, ["-UPROCESSES", "-DPROCESSES=nvmlDeviceGetComputeRunningProcesses_v2"])
    nvml.answer("80 61 7:61")
    assert nvml_memory(nvml.library)[0].processes == (GpuProcess(7, 61),)


@needs_compiler
@pytest.mark.process
def test_a_library_without_health_functions(tmp_path: Path) -> None:
    source = _LIBRARY + '\nconst char *nvmlErrorString(int code) { return "none"; }\n'
    library = compiled(tmp_path, source, "-DBROKEN=0")
    found = nvml_health(library)
    assert isinstance(found, NvmlHealth)
    assert f"{library} is too old" in found.trouble
