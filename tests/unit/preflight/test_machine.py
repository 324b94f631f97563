"""Judgements of this machine's limits, disks and GPUs, and the correctness of the facts."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from pathlib import Path

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


def status(result: CheckResult, *values: str) -> str:
    """The status, after looking for values in what is told."""
    assert [each for each in values if each not in f"{result.fact}; {result.remedy}"] == [], result
    assert bool(result.remedy) == (result.status in ("WARN", "FAIL")), "a remedy where it is needed, and only there"
    return result.status


@pytest.mark.parametrize(
    ("soft", "hard", "values", "expected"),
    [
        (255, NO_LIMIT, ["255", "unlimited", "ulimit -n 65536"], "FAIL"),
        (256, 20_000, ["ulimit -n 20000"], "WARN"),
        (4095, 4095, ["hard limit to 65536"], "WARN"),
        (4096, 4096, [], "PASS"),
        (NO_LIMIT, NO_LIMIT, ["unlimited"], "PASS"),
    ],
)
def test_open_files(soft: int, hard: int, values: list[str], expected: str) -> None:
    assert status(machine.judge_open_files(soft, hard), *values) == expected


@pytest.mark.parametrize(
    ("devices", "limit", "expected"),
    [
        ([], 0, "SKIP"),
        (["mlx5_0"], (64 << 20) - 1, "FAIL"),
        (["mlx5_0"], 64 << 20, "WARN"),
        (["mlx5_0"], NO_LIMIT, "PASS"),
    ],
)
def test_locked_memory_matters_where_there_is_infiniband(devices: list[str], limit: int, expected: str) -> None:
    assert status(machine.judge_locked_memory(limit, devices), *devices) == expected


@pytest.mark.parametrize(
    ("user", "group", "values", "expected"),
    [
        (NO_LIMIT, NO_LIMIT, [], "PASS"),
        (2048, NO_LIMIT, ["2048"], "PASS"),
        (2047, NO_LIMIT, ["2047", "ulimit -u"], "WARN"),
        (255, NO_LIMIT, ["255"], "FAIL"),
        (NO_LIMIT, 2047, ["2047", "pids.max"], "WARN"),
        (100_000, 10, ["10", "pids.max"], "FAIL"),
        (10, 100_000, ["10", "ulimit -u"], "FAIL"),
    ],
)
def test_processes(user: int, group: int, values: list[str], expected: str) -> None:
    assert status(machine.judge_processes(user, group), *values) == expected


def test_the_limits_of_this_process_are_read() -> None:
    files, _, processes = machine.process_limits(CheckInputs())
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert "unlimited" in files.fact or str(soft) in files.fact
    assert processes.status is not Status.SKIP


@pytest.mark.parametrize(
    ("total", "free", "values", "expected"),
    [
        (64 * MEBIBYTE, 64 * MEBIBYTE, ["64 MiB of 64 MiB", "--shm-size"], "FAIL"),
        (512 * MEBIBYTE, 64 * MEBIBYTE + 1, ["--shm-size"], "WARN"),
        (64 * GIBIBYTE, GIBIBYTE - 1, ["finished programs"], "WARN"),
        (GIBIBYTE, GIBIBYTE, ["1.0 GiB"], "PASS"),
    ],
)
def test_shared_memory(total: int, free: int, values: list[str], expected: str) -> None:
    assert status(machine.judge_shared_memory(Room("/dev/shm", total, free)), *values) == expected


@pytest.mark.parametrize(
    ("free", "files", "values", "expected"),
    [
        (GIBIBYTE, -1, [], "PASS"),
        (GIBIBYTE, 10_000, [], "PASS"),
        (GIBIBYTE - 1, 10_000, [], "WARN"),
        (64 * MEBIBYTE - 1, 10_000, [], "FAIL"),
        (GIBIBYTE, 9_999, ["9999"], "WARN"),
        (GIBIBYTE - 1, 99, ["99"], "FAIL"),
        (0, 9_999, ["0 MiB of"], "FAIL"),
    ],
)
def test_space(free: int, files: int, values: list[str], expected: str) -> None:
    assert status(machine.judge_space(Room("/logs", 9 * GIBIBYTE, free, files)), "/logs", *values) == expected


def test_a_folder_that_cannot_be_written_is_a_failure() -> None:
    found = Room("/logs", GIBIBYTE, GIBIBYTE, trouble="Disk quota exceeded")
    for judge in (machine.judge_space, machine.judge_shared_memory):
        assert status(judge(found), "/logs", "Disk quota exceeded") == "FAIL"


def test_a_log_folder_that_is_not_there_yet_is_judged_by_the_one_above_it(tmp_path: Path) -> None:
    (found,) = machine.log_space(CheckInputs(str(tmp_path / "a" / "b")))
    assert found.fact.startswith(f"{tmp_path} has ")
    assert os.listdir(tmp_path) == [], "nothing is left"
    (tmp_path / "file").touch()
    (found,) = machine.log_space(CheckInputs(str(tmp_path / "file" / "b")))
    assert status(found, str(tmp_path / "file"), "Not a directory") == "FAIL"
    for none in ("", "/dev/null"):
        (found,) = machine.log_space(CheckInputs(none))
        assert found.status is Status.SKIP


def test_the_temporary_folder_that_is_wanted_counts_and_not_what_stands_in_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    (found,) = machine.temp_space(CheckInputs())
    assert status(found, str(tmp_path / "none"), "No such file or directory") == "FAIL"
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (found,) = machine.temp_space(CheckInputs())
    assert found.fact.startswith(f"{tmp_path} has ")


GPU = GpuHealth("0000:3b:00.0", "NVIDIA H200", errors=0)


def eight(last: GpuHealth = GPU) -> NvmlHealth:
    """Eight GPUs, of which this is the last."""
    return NvmlHealth("", "570.1", (*(GPU,) * 7, last))


@pytest.mark.parametrize(
    ("health", "numbers", "values", "expected"),
    [
        (None, (8, 8, 0), ["libnvidia-ml.so.1", "8 GPUs"], "WARN"),
        (NvmlHealth("Driver/library version mismatch"), (8, 8, 0), ["version mismatch"], "FAIL"),
        (eight(GPU._replace(trouble="GPU is lost", address="GPU 7")), (8, 8, 0), ["1 of 8", "GPU 7"], "FAIL"),
        (eight(), (9, 8, 0), ["9 GPUs", "driver lists 8"], "FAIL"),
        (eight(), (8, 8, 8), ["8 NVIDIA H200", "570.1"], "PASS"),
        (eight(), (8, 8, 9), ["9 workers share 8"], "WARN"),
        (eight(), (8, 0, 3), [], "PASS"),
    ],
)
def test_gpus(health: NvmlHealth | None, numbers: tuple[int, int, int], values: list[str], expected: str) -> None:
    assert status(machine.judge_gpus(health, *numbers), *values) == expected


def test_accelerators_of_other_makers(tmp_path: Path) -> None:
    amd = seen({}, machines.amd(tmp_path, [MI300] * 8, range(8)))
    facts = ["8 AMD GPUs", "health is not checked"]
    assert status(machine.judge_accelerators(best(amd), "", ""), *facts) == "PASS"
    assert status(machine.judge_accelerators(best(amd), "", "", 9), *facts, "9 workers share them") == "WARN"
    refused = machine.judge_accelerators(None, "this process may open none", "add it to the group")
    assert status(refused, "may open none", "add it to the group; or set --nproc-per-node to a number") == "WARN"
    assert status(machine.judge_accelerators(None, "", "")) == "SKIP"


@pytest.mark.parametrize(
    ("found", "workers", "values", "expected"),
    [
        (Processors(64, 64), 0, ["64 of 64 processors"], "PASS"),
        (Processors(1, 64), 0, ["1 of 64 processors"], "PASS"),
        (Processors(1, 64), 1, ["1 of 64 processors"], "PASS"),
        (Processors(1, 64), 4, ["4 workers share 1 processor of 64"], "WARN"),
        (Processors(64, 64, 2.5), 4, ["4 workers share a CPU quota of 2.5 of 64", "limits.cpu"], "WARN"),
        (Processors(64, 64, 8.0), 4, ["CPU quota of 8"], "PASS"),
    ],
)
def test_processors_for_workers(found: Processors, workers: int, values: list[str], expected: str) -> None:
    assert status(machine.judge_cpus(found, workers, {}), *values) == expected


@pytest.mark.parametrize(
    ("health", "values", "expected"),
    [
        (None, [], "SKIP"),
        (eight(), ["8 GPUs"], "PASS"),
        (NvmlHealth("", "570.1", (GPU._replace(errors=-1),)), ["ECC"], "SKIP"),
        (eight(GPU._replace(errors=3)), ["3 on 0000:3b:00.0"], "FAIL"),
        (eight(GPU._replace(remap_pending=True)), ["0000:3b:00.0"], "WARN"),
        (eight(GPU._replace(remap_failed=True, remap_pending=True)), ["0000:3b:00.0"], "FAIL"),
        (eight(GPU._replace(trouble="GPU is lost")), ["7 GPUs"], "PASS"),
    ],
)
def test_gpu_memory(health: NvmlHealth | None, values: list[str], expected: str) -> None:
    assert status(machine.judge_gpu_memory(health), *values) == expected


HELD = "GPU 0: 61 GiB held by pid 4711 (python, user bob)"


@pytest.mark.parametrize(
    ("health", "held", "values", "expected"),
    [
        (eight(), [HELD], [HELD, "end that process, or choose other GPUs with CUDA_VISIBLE_DEVICES"], "WARN"),
        (NvmlHealth("", "570.1", (GPU._replace(errors=-1),)), [HELD, "GPU 1"], [f"{HELD}; GPU 1;"], "WARN"),
        (eight(GPU._replace(errors=3)), [HELD], ["3 on 0000:3b:00.0"], "FAIL"),
        (eight(), [HELD] * 10, ["; and 2 more;"], "WARN"),
    ],
)
def test_gpu_memory_that_others_hold(health: NvmlHealth, held: list[str], values: list[str], expected: str) -> None:
    assert status(machine.judge_gpu_memory(health, held), *values) == expected


def test_who_holds_gpu_memory_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of the job itself, small ones and those that have ended are not worth a line."""
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
    assert status(memory) == "PASS", "workers will use no GPU"


LOG = [
    b"6,1,1000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, off the bus.\n SUBSYSTEM=pci\n",
    b"6,2,7200000000,-;NVRM: Xid (PCI:0000:3c:00): 31, pid=1, Ch 00000008\n",
    b"6,3,7200000000,-;eth0: link is up\n",
    b"6,4,9000000000,-;NVRM: Xid (0000:3d:00): 48, pid=1, DBE\n",
    b"no properties",
]


def test_xids_are_found_in_the_kernel_s_log() -> None:
    found = machine.xid_errors(log_entries(LOG), 10_800.0)
    assert found == [(10_799.0, "PCI:0000:3b:00", 79), (3600.0, "PCI:0000:3c:00", 31), (1800.0, "0000:3d:00", 48)]
    assert status(machine.judge_xid(found), "2 in the last", "0.5 hours ago", "Xid 48 of 0000:3d:00") == "WARN"


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([], "PASS"),
        ([Xid(10.0, "PCI:0000:3b:00", 31)], "PASS"),
        ([Xid(24 * 3600.0, "PCI:0000:3b:00", 79)], "PASS"),
        ([Xid(24 * 3600.0 - 1, "PCI:0000:3b:00", 79)], "WARN"),
    ],
)
def test_old_errors_and_those_of_programs_do_not_count(errors: list[Xid], expected: str) -> None:
    assert status(machine.judge_xid(errors)) == expected


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


def library(folder: Path, *flags: str) -> str:
    path = folder / "libnvidia-ml.so.1"
    command = ["cc", "-shared", "-fPIC", *flags, "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=_LIBRARY, text=True, check=True)
    return str(path)


@pytest.mark.process
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for a stand-in of the library")
def test_the_management_library_is_asked_for_health(tmp_path: Path) -> None:
    found = nvml_health(library(tmp_path, "-DBROKEN=0"))
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
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for a stand-in of the library")
def test_an_old_or_broken_management_library(tmp_path: Path) -> None:
    found = nvml_health(library(tmp_path, "-DBROKEN=0", "-DOLD"))
    assert found is not None
    assert [each.remap_pending for each in found.gpus] == [True, True, True, False], "pages are retired instead"
    other = tmp_path / "other"
    other.mkdir()
    assert nvml_health(library(other, "-DBROKEN=18")) == NvmlHealth("Driver/library version mismatch")
    assert nvml_health(str(tmp_path / "none.so")) is None
