"""What is made of limits, disks and GPUs of this machine; and that what is read of it is so."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from rallypoint.base.kernel_log import log_entries
from rallypoint.base.nvml import GpuHealth, NvmlHealth, nvml_health
from rallypoint.preflight import disks, gpus, limits
from rallypoint.preflight.disks import GIBIBYTE, MEBIBYTE, DiskFacts
from rallypoint.preflight.gpus import GpuFacts, XidFacts
from rallypoint.preflight.limits import NO_LIMIT, LimitFacts
from rallypoint.preflight.results import Judgement
from rallypoint.preflight.table import CheckInputs

FINE = LimitFacts(1 << 20, 1 << 20, NO_LIMIT, False, (), NO_LIMIT, NO_LIMIT)


def said(judgement: Judgement, *words: str) -> str:
    """The status, after looking for words in what is told."""
    text = f"{judgement.fact}; {judgement.remedy}"
    assert [word for word in words if word not in text] == [], text
    assert bool(judgement.remedy) == (judgement.status != "PASS"), "a remedy where something is wrong, and only there"
    return judgement.status if judgement.known else "not known"


@pytest.mark.parametrize(
    ("soft", "status"),
    [(0, "FAIL"), (255, "FAIL"), (256, "WARN"), (4095, "WARN"), (4096, "PASS"), (NO_LIMIT, "PASS")],
)
def test_open_files_by_the_limit_that_workers_have(soft: int, status: str) -> None:
    words = ("unlimited" if soft == NO_LIMIT else str(soft), *([] if status == "PASS" else ["ulimit -n 65536"]))
    assert said(limits.judge_open_files(FINE._replace(soft_files=soft)), *words) == status


@pytest.mark.parametrize(
    ("hard", "remedy"),
    [
        (NO_LIMIT, "set `ulimit -n 65536`"),
        (1 << 20, "set `ulimit -n 65536`"),
        (20_000, "set `ulimit -n 20000`"),
        (4095, "raise the hard limit to 65536: LimitNOFILE="),
    ],
)
def test_what_is_said_of_open_files_can_be_done(hard: int, remedy: str) -> None:
    assert limits.judge_open_files(FINE._replace(soft_files=1024, hard_files=hard)).remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("devices", "locked", "may_lock", "status"),
    [
        ((), 0, False, "not known"),
        (("mlx5_0",), 65536, False, "FAIL"),
        (("mlx5_0",), (64 << 20) - 1, False, "FAIL"),
        (("mlx5_0",), 64 << 20, False, "WARN"),
        (("mlx5_0",), NO_LIMIT, False, "PASS"),
        (("mlx5_0",), 0, True, "PASS"),
    ],
)
def test_locked_memory_matters_where_there_is_infiniband(
    devices: tuple[str, ...], locked: int, may_lock: bool, status: str
) -> None:
    facts = FINE._replace(infiniband=devices, locked_memory=locked, may_lock=may_lock)
    words = ["mlx5_0", "ulimit -l unlimited"] if status in ("WARN", "FAIL") else []
    assert said(limits.judge_locked_memory(facts), *words) == status


@pytest.mark.parametrize(
    ("user", "group", "words", "status"),
    [
        (NO_LIMIT, NO_LIMIT, ["no limit"], "PASS"),
        (2048, NO_LIMIT, ["this user", "2048"], "PASS"),
        (2047, NO_LIMIT, ["2047", "ulimit -u"], "WARN"),
        (255, NO_LIMIT, ["255", "ulimit -u"], "FAIL"),
        (NO_LIMIT, 2047, ["control group", "2047", "pids.max", "--pids-limit"], "WARN"),
        (100_000, 10, ["control group", "10", "podPidsLimit"], "FAIL"),
        (10, 100_000, ["this user", "ulimit -u"], "FAIL"),
    ],
)
def test_processes(user: int, group: int, words: list[str], status: str) -> None:
    facts = FINE._replace(processes=user, cgroup_processes=group)
    assert said(limits.judge_processes(facts), *words) == status


def test_the_limits_of_this_process_are_read() -> None:
    facts = limits.read_limits(CheckInputs())
    assert (facts.soft_files, facts.hard_files) == resource.getrlimit(resource.RLIMIT_NOFILE)
    assert facts.cgroup_processes == NO_LIMIT or facts.cgroup_processes >= 0
    assert facts.processes in (NO_LIMIT, resource.getrlimit(resource.RLIMIT_NPROC)[0])


@pytest.mark.parametrize(
    ("total", "free", "words", "status"),
    [
        (64 * MEBIBYTE, 64 * MEBIBYTE, ["64 MiB of 64 MiB", "--shm-size", "emptyDir"], "FAIL"),
        (64 * MEBIBYTE, 0, ["0 MiB of 64 MiB", "--shm-size"], "FAIL"),
        (512 * MEBIBYTE, 512 * MEBIBYTE, ["512 MiB", "--shm-size"], "WARN"),
        (GIBIBYTE, GIBIBYTE, ["1.0 GiB"], "PASS"),
        (64 * GIBIBYTE, GIBIBYTE - 1, ["have left in /dev/shm"], "WARN"),
        (64 * GIBIBYTE, MEBIBYTE, ["have left in /dev/shm"], "FAIL"),
    ],
)
def test_shared_memory(total: int, free: int, words: list[str], status: str) -> None:
    assert said(disks.judge_shared_memory(DiskFacts("/dev/shm", total, free)), *words) == status


def test_shared_memory_that_nobody_can_write() -> None:
    facts = DiskFacts("/dev/shm", GIBIBYTE, GIBIBYTE, trouble="Permission denied")
    assert said(disks.judge_shared_memory(facts), "cannot be written to (Permission denied)", "--shm-size") == "FAIL"


@pytest.mark.parametrize(
    ("free", "files", "words", "status"),
    [
        (GIBIBYTE, -1, ["1.0 GiB of"], "PASS"),
        (GIBIBYTE, 10_000, [], "PASS"),
        (GIBIBYTE - 1, 10_000, ["make room"], "WARN"),
        (64 * MEBIBYTE - 1, 10_000, ["make room"], "FAIL"),
        (GIBIBYTE, 9_999, ["9999 more files (inodes)"], "WARN"),
        (GIBIBYTE, 99, ["99 more files (inodes)"], "FAIL"),
        (GIBIBYTE - 1, 0, ["0 more files (inodes)"], "FAIL"),
        (0, 9_999, ["0 MiB of"], "FAIL"),
    ],
)
def test_space(free: int, files: int, words: list[str], status: str) -> None:
    assert said(disks.judge_space(DiskFacts("/logs", 9 * GIBIBYTE, free, files)), "/logs", *words) == status


def test_no_log_folder_is_no_fault_and_one_that_cannot_be_written_is() -> None:
    assert said(disks.judge_space(None), "temporary folder") == "not known"
    facts = DiskFacts("/logs", GIBIBYTE, GIBIBYTE, trouble="Disk quota exceeded")
    assert said(disks.judge_space(facts), "/logs cannot be written to (Disk quota exceeded)") == "FAIL"


def test_a_folder_that_is_not_there_yet_is_judged_by_the_one_above_it(tmp_path: Path) -> None:
    facts = disks.read_log_dir(CheckInputs(str(tmp_path / "a" / "b")))
    assert facts is not None
    assert (facts.folder, facts.trouble) == (str(tmp_path), "")
    assert facts.total > 0
    assert os.listdir(tmp_path) == [], "nothing is left"
    (tmp_path / "file").touch()
    facts = disks.read_log_dir(CheckInputs(str(tmp_path / "file" / "b")))
    assert facts is not None
    assert (facts.folder, facts.trouble) == (str(tmp_path / "file"), "Not a directory")
    assert disks.read_log_dir(CheckInputs("")) is None
    assert disks.read_log_dir(CheckInputs("/dev/null")) is None


def test_the_temporary_folder_that_is_wanted_counts_and_not_what_stands_in_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    assert disks.read_temp_dir(CheckInputs()) == DiskFacts(str(tmp_path / "none"), trouble="No such file or directory")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert disks.read_temp_dir(CheckInputs()).trouble == ""


GPU = GpuHealth("0000:3b:00.0", "NVIDIA H200", errors=0)
EIGHT = GpuFacts(NvmlHealth("", "570.1", (GPU,) * 8), 8, 8)


def with_gpu(last: GpuHealth) -> GpuFacts:
    """Eight, of which this is the last."""
    return EIGHT._replace(nvml=NvmlHealth("", "570.1", (*(GPU,) * 7, last)))


@pytest.mark.parametrize(
    ("facts", "words", "status"),
    [
        (GpuFacts(None), ["no NVIDIA driver"], "not known"),
        (GpuFacts(None, 8, 8), ["libnvidia-ml.so.1", "8 GPUs", "NVIDIA_DRIVER_CAPABILITIES"], "WARN"),
        (GpuFacts(NvmlHealth("Driver/library version mismatch"), 8, 8), ["version mismatch", "nvidia-smi"], "FAIL"),
        (
            with_gpu(GPU._replace(trouble="GPU is lost", address="GPU 7")),
            ["1 of 8 GPUs", "GPU 7 (GPU is lost)"],
            "FAIL",
        ),
        (EIGHT._replace(listed=9), ["lists 9 GPUs", "knows 8"], "FAIL"),
        (EIGHT, ["8 NVIDIA H200", "570.1"], "PASS"),
        (EIGHT._replace(workers=8), [], "PASS"),
        (EIGHT._replace(workers=9), ["9 workers share 8"], "WARN"),
        (EIGHT._replace(workers=3, visible=2), ["3 workers share 2"], "WARN"),
        (EIGHT._replace(workers=3, visible=0), [], "PASS"),
    ],
)
def test_gpus(facts: GpuFacts, words: list[str], status: str) -> None:
    assert said(gpus.judge_gpus(facts), *words) == status


@pytest.mark.parametrize(
    ("facts", "words", "status"),
    [
        (GpuFacts(None), [], "not known"),
        (EIGHT, ["8 GPUs"], "PASS"),
        (GpuFacts(NvmlHealth("", "570.1", (GPU._replace(errors=-1),)), 1, 1), ["ECC is off"], "not known"),
        (with_gpu(GPU._replace(errors=3)), ["3 on 0000:3b:00.0", "reset"], "FAIL"),
        (with_gpu(GPU._replace(remap_pending=True)), ["0000:3b:00.0", "reset"], "WARN"),
        (with_gpu(GPU._replace(remap_failed=True, remap_pending=True)), ["0000:3b:00.0", "replaced"], "FAIL"),
        (with_gpu(GPU._replace(trouble="GPU is lost")), ["7 GPUs"], "PASS"),
    ],
)
def test_gpu_memory(facts: GpuFacts, words: list[str], status: str) -> None:
    assert said(gpus.judge_gpu_memory(facts), *words) == status


LOG = [
    b"6,1,1000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python, off the bus.\n SUBSYSTEM=pci\n",
    b"6,2,7200000000,-;NVRM: Xid (PCI:0000:3c:00): 31, pid=1, Ch 00000008\n",
    b"6,3,7200000000,-;eth0: link is up\n",
    b"6,4,9000000000,-;NVRM: Xid (0000:3d:00): 48, pid=1, DBE\n",
    b"no properties",
]


def test_xids_are_found_in_the_kernel_s_log() -> None:
    facts = gpus.xid_facts(log_entries(LOG), 10_800.0)
    assert facts.errors == (
        (10_799.0, "PCI:0000:3b:00", 79),
        (3600.0, "PCI:0000:3c:00", 31),
        (1800.0, "0000:3d:00", 48),
    )
    assert said(gpus.judge_xid(facts), "2 in the last 24 hours", "0.5 hours ago: Xid 48 of 0000:3d:00") == "WARN"


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        (XidFacts(), "PASS"),
        (XidFacts(trouble="/dev/kmsg cannot be read (Operation not permitted)"), "not known"),
        (XidFacts(((10.0, "PCI:0000:3b:00", 31),)), "PASS"),
        (XidFacts(((25 * 3600.0, "PCI:0000:3b:00", 79),)), "PASS"),
        (XidFacts(((23 * 3600.0, "PCI:0000:3b:00", 79),)), "WARN"),
    ],
)
def test_old_errors_and_those_of_programs_do_not_count(facts: XidFacts, status: str) -> None:
    assert said(gpus.judge_xid(facts)) == status


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
