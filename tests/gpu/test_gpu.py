"""The command that tries Rallypoint on GPUs, run without one: its output, and that its checks can fail."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.case import BenchError

from rallypoint.base.devices import cuda_count
from tests.faults.network import why_not
from tests.gpu.machine import ROOT, Gpu, Machine, address_of, environment
from tests.gpu.page import page_of
from tests.gpu.rows import Bench, Check, Needs, Row, Unexpected, rows_of, write_results
from tests.nvml import StandIn, needs_compiler
from tests.processes import completed

_ONE_GPU = Needs()
FAKE = Path(__file__).parent / "fake"
_NO_GPU = pytest.mark.skipif(cuda_count({}) > 0, reason="there is a GPU here: `make gpu` tries it")


def _machine(gpus: int = 1) -> Machine:
    found = tuple(Gpu("Fake|H100", f"GPU-{number}", f"0000:0{number}:00.0", 1 << 36) for number in range(gpus))
    return Machine(found, found, 8, "6.1 x86_64", "580.00", "3.12.1", "2.11.0", "13.0", "2.27.7", "0.2.0", "abc")


def _rows(tmp_path: Path, *checks: Check, gpus: int = 1, nodes: int = 1, limit: float = math.inf) -> list[Row]:
    noted: list[Row] = []
    bench = Bench(_machine(gpus), "cuda", tmp_path)
    rows = rows_of(checks, bench, nodes, limit, noted.append)
    assert noted == rows
    return rows


def _check(run: Callable[[Bench], str], needs: Needs = _ONE_GPU) -> Check:
    return Check("group", "what", "expected", run, needs)


def _raises(error: Exception) -> Callable[[Bench], str]:
    def run(_bench: Bench) -> str:
        raise error

    return run


def test_a_check_that_fails_is_a_row_and_the_next_one_runs(tmp_path: Path) -> None:
    rows = _rows(
        tmp_path,
        _check(_raises(Unexpected("3 where 4 are\n expected"))),
        _check(_raises(BenchError("no step came"))),
        _check(_raises(KeyError("gone"))),
        _check(lambda _bench: "all well"),
    )
    assert [(row.state, row.seen) for row in rows] == [
        ("failed", "3 where 4 are expected"),
        ("failed", "no step came"),
        ("failed", "KeyError: 'gone'"),
        ("passed", "all well"),
    ]


def test_what_this_machine_cannot_show_is_a_row(tmp_path: Path) -> None:
    checks = [_check(_raises(AssertionError()), needs) for needs in (Needs(gpus=2), Needs(nodes=2))]
    assert [(row.state, row.seen) for row in _rows(tmp_path, *checks)] == [
        ("not run", "needs 2 GPUs"),
        ("not run", "needs 2 nodes"),
    ]
    assert [row.seen for row in _rows(tmp_path, checks[0], gpus=2, nodes=2)] == ["runs on one node"]


def test_checks_that_have_no_time_are_failures(tmp_path: Path) -> None:
    (row,) = _rows(tmp_path, _check(_raises(AssertionError())), limit=time.monotonic())
    assert row.state == "failed"
    assert "time limit" in row.seen


def test_the_page_is_that_of_the_recorded_results() -> None:
    recorded = (ROOT / "docs" / "gpu.json").read_text()
    assert (ROOT / "docs" / "gpu.md").read_text() == page_of(recorded)


def test_a_page_says_what_has_not_been_run(tmp_path: Path) -> None:
    rows = [Row("group", "a|b", "x", "y", "passed", 1.0), Row("group", "c", "x", "needs a GPU", "not run", 0.0)]
    for rehearsed in (True, False):
        write_results(tmp_path / "gpu.json", _machine(), rows, "2026-11-28T10:00:00+00:00", rehearsed=rehearsed)
        page = page_of((tmp_path / "gpu.json").read_text())
        assert ("We have not recorded a run on a GPU yet" in page) == rehearsed
        assert (r"| a\|b | x | not run | passed | y |" in page) == rehearsed
        assert (r"| a\|b | x | passed | y |" in page) != rehearsed
        assert "1 passed, 0 failed, 1 not run" in page
        assert r"1 × Fake\|H100, 64 GiB" in page


def test_an_address_of_nvidia_smi() -> None:
    assert address_of("00000000:0A:00.0") == "0000:0a:00.0"


@_NO_GPU
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu", f"--json={tmp_path / 'gpu.json'}"]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment()}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (77, "")
    assert done.stderr == "there is no NVIDIA GPU that torch can use here; nothing was tried\n"
    assert not list(tmp_path.iterdir())


_ENTER = """
set -e
mount -t tmpfs none /proc/driver && cp -r "$1"/driver/. /proc/driver
mount -t tmpfs none /sys/bus/pci/devices && cp -r "$1"/devices/. /sys/bus/pci/devices
shift
exec "$@"
"""


def _fake_gpus(folder: Path) -> dict[str, str]:
    """Lay out two GPUs, as the driver, the kernel, nvidia-smi, NVML and a stand-in for torch show them."""
    nvml = StandIn(folder)
    nvml.answer("68719476736 1 ", "68719476736 1 ")
    lines = []
    for number in range(2):
        uuid, address = f"GPU-{number}", f"0000:0{number + 1}:00.0"
        lines.append(f"{uuid} {address}\n")
        information = folder / "driver/nvidia/gpus" / address / "information"
        information.parent.mkdir(parents=True)
        information.write_text(f"Model: \t Fake H100\nGPU UUID: \t {uuid}\nDevice Minor: \t {number}\n")
        device = folder / "devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text("0\n")
        (device / "local_cpulist").write_bytes(Path("/sys/devices/system/node/node0/cpulist").read_bytes())
    (folder / "gpus.txt").write_text("".join(lines))
    return {
        "PATH": f"{FAKE}:{os.environ['PATH']}",
        "PYTHONPATH": f"{FAKE}",
        "LD_LIBRARY_PATH": str(folder),
        "FAKE_GPUS": str(folder / "gpus.txt"),
    }


def _on_fake_gpus(folder: Path, variables: dict[str, str], *only: str) -> dict[str, Row]:
    results = folder / "results.json"
    command = ["unshare", "--mount", "sh", "-c", _ENTER, "sh", str(folder), sys.executable, "-m", "tests.gpu"]
    command += [f"--json={results}", *(f"--only={text}" for text in only)]
    done = completed(command, cwd=ROOT, env={**os.environ, **variables})
    rows = [Row(**row) for row in json.loads(results.read_text())["rows"]]
    assert done.returncode == sum(row.state == "failed" for row in rows), done.stdout + done.stderr
    return {row.what: row for row in rows}


@pytest.mark.root
@pytest.mark.skipif(why_not() is not None, reason=f"no namespaces: {why_not()}")
@_NO_GPU
@needs_compiler
def test_the_rows_about_devices_on_a_machine_whose_gpus_are_files(tmp_path: Path) -> None:
    """It proves the plumbing of the checks, and nothing of a GPU."""
    variables = _fake_gpus(tmp_path)
    rows = _on_fake_gpus(tmp_path, variables, "devices", "a CUDA error: device-side", "a CUDA error: out of", "bundle")
    failed = {row.what: row.seen for row in rows.values() if row.state != "passed"}
    assert failed == {}
    assert len(rows) == 13
    assert rows["GPUs in the machine"].seen == "2 (Fake H100)"


@pytest.mark.root
@pytest.mark.skipif(why_not() is not None, reason=f"no namespaces: {why_not()}")
@_NO_GPU
@needs_compiler
def test_a_machine_of_which_torch_sees_other_gpus_fails(tmp_path: Path) -> None:
    variables = _fake_gpus(tmp_path)
    (tmp_path / "gpus.txt").write_text("GPU-7 0000:01:00.0\n")
    rows = _on_fake_gpus(tmp_path, variables, "GPUs that a worker sees", "per-node=gpu and auto", "VISIBLE")
    assert {row.state for row in rows.values()} == {"failed"}
    assert "torch: [('GPU-7', '0000:01:00.0')]" in rows["GPUs that a worker sees"].seen
