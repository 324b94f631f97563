"""Checks of this machine's limits, disks and GPUs."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rallypoint.base.devices import best, seen
from rallypoint.base.nvml import GpuHealth, GpuMemory, GpuProcess, NvmlHealth, nvml_health
from rallypoint.clusters.preflight import machine
from rallypoint.clusters.preflight.machine import GIBIBYTE, MEBIBYTE, NO_LIMIT, Room, Xid
from rallypoint.clusters.preflight.results import CheckInputs, CheckResult, Status
from rallypoint.clusters.processors import Processors
from rallypoint.failures.failure import log_entries
from tests import machines
from tests.machines import MI300
from tests.nvml import compiled, needs_compiler


def status(result: CheckResult, *values: str) -> str:
    """The status, after checking the remedy and that the texts have these values."""
    assert [value for value in values if value not in f"{result.fact}; {result.remedy}"] == [], result
    assert bool(result.remedy) == (result.status in ("WARN", "FAIL"))
    return result.status


GPU = GpuHealth("0000:3b:00.0", "NVIDIA H200", errors=0)
HELD = "GPU 0: 61 GiB held by pid 4711 (python, user bob)"


def eight(last: GpuHealth = GPU) -> NvmlHealth:
    """Eight GPUs ending with this one."""
    return NvmlHealth("", "570.1", (*(GPU,) * 7, last))


NO_ECC = NvmlHealth("", "570.1", (GPU._replace(errors=-1),))
LOST, FAULTY = eight(GPU._replace(trouble="GPU is lost", address="GPU 7")), eight(GPU._replace(errors=3))
REMAPS, CANNOT_REMAP = GPU._replace(remap_pending=True), GPU._replace(remap_pending=True, remap_failed=True)


def disk(free: int, files: int) -> Room:
    return Room("/logs", 9 * GIBIBYTE, free, files)


def xid(seconds_ago: float, number: int) -> list[Xid]:
    return [Xid(seconds_ago, "PCI:0000:3b:00", number)]


JUDGED: dict[Callable[..., CheckResult], list[tuple[tuple[Any, ...], list[str], str]]] = {
    machine.judge_open_files: [
        ((255, NO_LIMIT), ["255", "unlimited", "ulimit -n 65536"], "FAIL"),
        ((256, 20_000), ["ulimit -n 20000"], "WARN"),
        ((4095, 4095), ["hard limit to 65536"], "WARN"),
        ((4096, 4096), [], "PASS"),
        ((NO_LIMIT, NO_LIMIT), ["unlimited"], "PASS"),
    ],
    machine.judge_locked_memory: [
        ((0, []), [], "SKIP"),
        (((64 << 20) - 1, ["mlx5_0"]), ["mlx5_0"], "FAIL"),
        ((64 << 20, ["mlx5_0"]), ["mlx5_0"], "WARN"),
        ((NO_LIMIT, ["mlx5_0"]), ["mlx5_0"], "PASS"),
    ],
    machine.judge_processes: [
        ((NO_LIMIT, NO_LIMIT), [], "PASS"),
        ((2048, NO_LIMIT), ["2048"], "PASS"),
        ((2047, NO_LIMIT), ["2047", "ulimit -u"], "WARN"),
        ((255, NO_LIMIT), ["255"], "FAIL"),
        ((NO_LIMIT, 2047), ["2047", "pids.max"], "WARN"),
        ((100_000, 10), ["10", "pids.max"], "FAIL"),
        ((10, 100_000), ["10", "ulimit -u"], "FAIL"),
    ],
    machine.judge_shared_memory: [
        ((Room("/dev/shm", 64 * MEBIBYTE, 64 * MEBIBYTE),), ["64 MiB of 64 MiB", "--shm-size"], "FAIL"),
        ((Room("/dev/shm", 512 * MEBIBYTE, 64 * MEBIBYTE + 1),), ["--shm-size"], "WARN"),
        ((Room("/dev/shm", 64 * GIBIBYTE, GIBIBYTE - 1),), ["finished programs"], "WARN"),
        ((Room("/dev/shm", GIBIBYTE, GIBIBYTE),), ["1.0 GiB"], "PASS"),
    ],
    machine.judge_space: [
        ((disk(GIBIBYTE, -1),), ["/logs"], "PASS"),
        ((disk(GIBIBYTE, 10_000),), ["/logs"], "PASS"),
        ((disk(GIBIBYTE - 1, 10_000),), ["/logs"], "WARN"),
        ((disk(64 * MEBIBYTE - 1, 10_000),), ["/logs"], "FAIL"),
        ((disk(GIBIBYTE, 9_999),), ["/logs", "9999"], "WARN"),
        ((disk(GIBIBYTE - 1, 99),), ["/logs", "99"], "FAIL"),
        ((disk(0, 9_999),), ["/logs", "0 MiB of"], "FAIL"),
    ],
    machine.judge_gpus: [
        ((None, 8, 8, 0), ["libnvidia-ml.so.1", "8 GPUs"], "WARN"),
        ((NvmlHealth("Driver/library version mismatch"), 8, 8, 0), ["version mismatch"], "FAIL"),
        ((LOST, 8, 8, 0), ["1 of 8", "GPU 7"], "FAIL"),
        ((eight(), 9, 8, 0), ["9 GPUs", "the driver lists 8"], "FAIL"),
        ((eight(), 8, 8, 8), ["8 NVIDIA H200", "570.1"], "PASS"),
        ((eight(), 8, 8, 9), ["9 workers share 8"], "WARN"),
        ((eight(), 8, 0, 3), [], "PASS"),
    ],
    machine.judge_cpus: [
        ((Processors(64, 64), 0, {}), ["64 of 64 processors"], "PASS"),
        ((Processors(1, 64), 0, {}), ["1 of 64 processors"], "PASS"),
        ((Processors(1, 64), 1, {}), ["1 of 64 processors"], "PASS"),
        ((Processors(1, 64), 4, {}), ["4 workers share 1 processor of 64"], "WARN"),
        ((Processors(64, 64, 2.5), 4, {}), ["4 workers share a CPU quota of 2.5 of 64", "limits.cpu"], "WARN"),
        ((Processors(64, 64, 8.0), 4, {}), ["with a CPU quota of 8"], "PASS"),
    ],
    machine.judge_gpu_memory: [
        ((None,), [], "SKIP"),
        ((eight(),), ["8 GPUs"], "PASS"),
        ((NO_ECC,), ["ECC"], "SKIP"),
        ((FAULTY,), ["3 on 0000:3b:00.0"], "FAIL"),
        ((eight(REMAPS),), ["0000:3b:00.0"], "WARN"),
        ((eight(CANNOT_REMAP),), ["0000:3b:00.0"], "FAIL"),
        ((LOST,), ["7 GPUs"], "PASS"),
        ((eight(), [HELD]), [HELD, "end that process, or choose other GPUs with CUDA_VISIBLE_DEVICES"], "WARN"),
        ((NO_ECC, [HELD, "GPU 1"]), [f"{HELD}; GPU 1;"], "WARN"),
        ((FAULTY, [HELD]), ["3 on 0000:3b:00.0"], "FAIL"),
        ((eight(), [HELD] * 10), ["; and 2 more;"], "WARN"),
    ],
    machine.judge_xid: [
        (([],), [], "PASS"),
        ((xid(10.0, 31),), [], "PASS"),  # a program's error
        ((xid(24 * 3600.0, 79),), [], "PASS"),  # an old error
        ((xid(24 * 3600.0 - 1, 79),), [], "WARN"),
    ],
}


@pytest.mark.parametrize(
    ("judge", "arguments", "values", "expected"),
    [(judge, *row) for judge, rows in JUDGED.items() for row in rows],
    ids=[f"{judge.__name__}-{number}" for judge, rows in JUDGED.items() for number in range(len(rows))],
)
def test_judges(
    judge: Callable[..., CheckResult], arguments: tuple[Any, ...], values: list[str], expected: str
) -> None:
    assert status(judge(*arguments), *values) == expected


def test_process_limits() -> None:
    files, _, processes = machine.process_limits(CheckInputs())
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert "unlimited" in files.fact or str(soft) in files.fact
    assert processes.status is not Status.SKIP


def test_a_folder_that_cannot_be_written() -> None:
    found = Room("/logs", GIBIBYTE, GIBIBYTE, trouble="Disk quota exceeded")
    for judge in (machine.judge_space, machine.judge_shared_memory):
        assert status(judge(found), "/logs", "Disk quota exceeded") == "FAIL"


def test_log_space(tmp_path: Path) -> None:
    (found,) = machine.log_space(CheckInputs(str(tmp_path / "a" / "b")))
    assert found.fact.startswith(f"{tmp_path} has ")
    assert os.listdir(tmp_path) == [], "no file is left"
    (tmp_path / "file").touch()
    (found,) = machine.log_space(CheckInputs(str(tmp_path / "file" / "b")))
    assert status(found, str(tmp_path / "file"), "Not a directory") == "FAIL"
    for none in ("", "/dev/null"):
        (found,) = machine.log_space(CheckInputs(none))
        assert found.status is Status.SKIP


def test_temp_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the fallbacks of `tempfile`."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    (found,) = machine.temp_space(CheckInputs())
    assert status(found, str(tmp_path / "none"), "No such file or directory") == "FAIL"
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (found,) = machine.temp_space(CheckInputs())
    assert found.fact.startswith(f"{tmp_path} has ")


def test_other_accelerators(tmp_path: Path) -> None:
    amd = seen({}, machines.amd(tmp_path, [MI300] * 8, range(8)))
    facts = ["8 AMD GPUs", "health is not checked"]
    assert status(machine.judge_accelerators(best(amd), "", ""), *facts) == "PASS"
    assert status(machine.judge_accelerators(best(amd), "", "", 9), *facts, "9 workers share them") == "WARN"
    refused = machine.judge_accelerators(None, "this process may open none", "add it to the group")
    assert status(refused, "may open none", "add it to the group; or set --nproc-per-node to a number") == "WARN"
    assert status(machine.judge_accelerators(None, "", "")) == "SKIP"


def test_gpu_memory_of_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without own, small and ended processes."""
    parent, own = os.getppid(), os.getpid()
    gone = GpuProcess((1 << 22) - 1, 61 * GIBIBYTE)
    first = GpuMemory("", "", None, None, (GpuProcess(parent, 61 * GIBIBYTE), gone, GpuProcess(own, GIBIBYTE)))
    second = GpuMemory("", "", None, None, (GpuProcess(parent, GIBIBYTE - 1), GpuProcess(1, None)))
    monkeypatch.setattr(machine, "nvml_memory", lambda: [first, second, GpuMemory()])
    monkeypatch.setattr(machine, "nvml_health", eight)
    monkeypatch.setattr(machine, "cuda_count", lambda _environ: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "pids_are_ours", lambda: True)
    _, memory = machine.gpus(CheckInputs())
    assert status(memory, f"GPU 0: 61 GiB held by pid {parent} (") == "WARN"
    assert "GPU 1" not in memory.fact
    assert memory.fact.count("held by") == 1
    monkeypatch.setattr(machine, "pids_are_ours", lambda: False)
    _, memory = machine.gpus(CheckInputs())
    assert status(memory, "GPU 0: 123 GiB held by processes that this container cannot identify") == "WARN"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    _, memory = machine.gpus(CheckInputs())
    assert status(memory) == "PASS", "workers use no GPU"


LOG = [
    b"6,1,1000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, off the bus.\n SUBSYSTEM=pci\n",
    b"6,2,7200000000,-;NVRM: Xid (PCI:0000:3c:00): 31, pid=1, Ch 00000008\n",
    b"6,3,7200000000,-;eth0: link is up\n",
    b"6,4,9000000000,-;NVRM: Xid (0000:3d:00): 48, pid=1, DBE\n",
    b"no properties",
]


def test_xid_errors() -> None:
    found = machine.xid_errors(log_entries(LOG), 10_800.0)
    assert found == [(10_799.0, "PCI:0000:3b:00", 79), (3600.0, "PCI:0000:3c:00", 31), (1800.0, "0000:3d:00", 48)]
    assert status(machine.judge_xid(found), "2 in the last", "0.5 hours ago", "Xid 48 of 0000:3d:00") == "WARN"


_LIBRARY = """
#include <string.h>
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char address[32]; };
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : "Driver/library version mismatch"; }
int nvmlInit_v2(void) { return BROKEN; }
int nvmlShutdown(void) { return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strncpy(text, "570.1", size); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 4; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned n, void **handle) {
    *handle = (void *)(long)(n + 1);
    return n == 3 ? 15 : 0;
}
int nvmlDeviceGetName(void *handle, char *text, unsigned size) { strncpy(text, "NVIDIA H200", size); return 0; }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) { strncpy(text, "GPU-one", size); return 0; }
int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *info) { info->bus = (long)handle; return 0; }
int nvmlDeviceGetTotalEccErrors(void *handle, int type, int counter, unsigned long long *count) {
    *count = type == 1 && counter == 0 ? 7 : 99;
    return (long)handle == 2 ? 3 : 0;
}
#ifndef OLD
int nvmlDeviceGetRemappedRows(void *handle, unsigned *ok, unsigned *bad, unsigned *pending, unsigned *failed) {
    *ok = *bad = 5; *pending = (long)handle == 1; *failed = (long)handle == 3;
    return (long)handle == 2 ? 3 : 0;
}
#endif
int nvmlDeviceGetRetiredPagesPendingStatus(void *handle, unsigned *pending) { *pending = 1; return 0; }
"""


@pytest.mark.process
@needs_compiler
def test_nvml_health(tmp_path: Path) -> None:
    found = nvml_health(compiled(tmp_path, _LIBRARY, "-DBROKEN=0"))
    assert found == NvmlHealth(
        "",
        "570.1",
        (
            GpuHealth("0000:01:00.0", "NVIDIA H200", "", 7, True, False),
            GpuHealth("0000:02:00.0", "NVIDIA H200", "", -1, True, False),
            GpuHealth("0000:03:00.0", "NVIDIA H200", "", 7, False, True),
            GpuHealth("GPU 3", "", "GPU is lost"),
        ),
    )


@pytest.mark.process
@needs_compiler
def test_nvml_health_of_old_and_broken_libraries(tmp_path: Path) -> None:
    found = nvml_health(compiled(tmp_path, _LIBRARY, "-DBROKEN=0", "-DOLD"))
    assert found is not None
    assert [gpu.remap_pending for gpu in found.gpus] == [True, True, True, False], "retired pages"
    other = tmp_path / "other"
    other.mkdir()
    assert nvml_health(compiled(other, _LIBRARY, "-DBROKEN=18")) == NvmlHealth("Driver/library version mismatch")
    assert nvml_health(str(tmp_path / "none.so")) is None
