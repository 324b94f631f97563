"""The number of workers by devices, and warnings of shared devices."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rallypoint.base.errors import UserError
from rallypoint.cli import sharing
from rallypoint.cli.convert import config_from_options
from rallypoint.cli.parse import parse
from rallypoint.cli.sharing import shared_devices
from rallypoint.cli.worker_count import count_accelerators, count_devices
from rallypoint.clusters.processors import Processors
from tests import machines
from tests.machines import APU, MI300, node


def _npus(root: Path) -> Path:
    for number in range(4):
        node(root, f"davinci{number}")
    return root


AMD: Callable[[Path], Path] = lambda root: machines.amd(root, [MI300] * 8, range(8))  # noqa: E731
CLOSED: Callable[[Path], Path] = lambda root: machines.amd(root, [MI300] * 8, [])  # noqa: E731
NVIDIA: Callable[[Path], Path] = lambda root: machines.nvidia(root, [0, 1, 2], [0, 1, 2])  # noqa: E731
NOTEBOOK: Callable[[Path], Path] = lambda root: machines.amd(root, [APU], [0])  # noqa: E731
CPUS = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("make", "text", "environ", "count"),
    [
        (AMD, "auto", {}, 8),
        (AMD, "gpu", {}, 8),
        (AMD, "gpu", {"ROCR_VISIBLE_DEVICES": "0,1"}, 2),
        (AMD, "cpu", {}, CPUS),
        (NVIDIA, "gpu", {"CUDA_VISIBLE_DEVICES": "0,2"}, 2),
        (NVIDIA, "auto", {"CUDA_VISIBLE_DEVICES": ""}, CPUS),  # hidden to use processors
        (NOTEBOOK, "auto", {}, CPUS),
        (NOTEBOOK, "gpu", {}, 1),
        (_npus, "auto", {}, 4),
        (_npus, "npu", {"ASCEND_RT_VISIBLE_DEVICES": "1,2"}, 2),
        (lambda root: root, "auto", {}, CPUS),
    ],
)
def test_workers_by_devices(
    tmp_path: Path, make: Callable[[Path], Path], text: str, environ: dict[str, str], count: int
) -> None:
    assert count_devices(text, environ, "--nproc-per-node", make(tmp_path)) == count
    assert count_accelerators({}, "auto", tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("make", "text", "environ", "words"),
    [
        # Processors are no substitute for accelerators that cannot be counted.
        (CLOSED, "auto", {}, ["may not open any of its 8 GPUs", "set the number", "groups render and video"]),
        (CLOSED, "gpu", {}, ["cannot count GPUs", "may not open any of its 8 GPUs", "set the number"]),
        (NVIDIA, "auto", {"CUDA_VISIBLE_DEVICES": "7"}, ["CUDA_VISIBLE_DEVICES='7' names none of the 3 NVIDIA GPUs"]),
        (lambda root: machines.accel(root, ["qaic"]), "auto", {}, ["the driver qaic", "set the number"]),
        (_npus, "gpu", {}, ["counts GPUs, but none could be opened on this machine"]),
        (NVIDIA, "gpu", {"CUDA_VISIBLE_DEVICES": "-1"}, ["none could be opened with CUDA_VISIBLE_DEVICES='-1'"]),
        (NVIDIA, "npu", {}, ["counts Ascend NPUs, but none could be opened"]),
        (NVIDIA, "tpus", {}, ["'tpus' is not a number", "cpu, gpu, xpu, auto", "npu"]),
    ],
)
def test_errors(
    tmp_path: Path, make: Callable[[Path], Path], text: str, environ: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(UserError) as refused:
        count_devices(text, environ, "--nproc-per-node", make(tmp_path))
    assert str(refused.value).startswith(f"--nproc-per-node={text}" if text != "tpus" else "--nproc-per-node='tpus'")
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("make", "workers", "environ", "line"),
    [
        (AMD, 8, {}, ""),
        (AMD, 9, {}, "9 workers share 8 AMD GPUs; start fewer workers"),
        (AMD, 2, {"HIP_VISIBLE_DEVICES": "3"}, "2 workers share 1 AMD GPU of 8, because of HIP_VISIBLE_DEVICES='3'"),
        (NVIDIA, 2, {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, "use --virtual-local-rank to give each worker its own"),
        (NVIDIA, 2, {"CUDA_VISIBLE_DEVICES": ""}, ""),
        (NOTEBOOK, 4, {}, ""),
        (lambda root: root, 4, {}, ""),
    ],
)
def test_shared_devices(
    tmp_path: Path, make: Callable[[Path], Path], workers: int, environ: dict[str, str], line: str
) -> None:
    found = shared_devices(workers, environ, make(tmp_path))
    assert bool(found) == bool(line)
    assert line in found


@pytest.mark.parametrize(("workers", "lines"), [(1, 0), (2, 1), (4, 1)])
def test_a_warning_of_shared_processors(
    workers: int, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sharing, "processors", lambda: Processors(1, 64))
    config_from_options(parse([f"--nproc-per-node={workers}", "s.py"], {}), {})
    found = [record.getMessage() for record in caplog.records if "share 1 processor of 64" in record.getMessage()]
    assert len(found) == lines


def test_a_checked_list_is_not_shared(tmp_path: Path) -> None:
    """Each worker gets one of two MIG instances."""
    environ = {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}
    assert not shared_devices(2, environ, NVIDIA(tmp_path), each_gets_one=True)
    assert shared_devices(4, {}, tmp_path, each_gets_one=True)
