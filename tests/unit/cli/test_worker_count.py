"""The number of workers by devices, on faked machines."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rallypoint.base.errors import UserError
from rallypoint.cli.worker_count import count_accelerators, count_devices
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
        (NVIDIA, "auto", {"CUDA_VISIBLE_DEVICES": ""}, CPUS),  # hidden, by somebody who wants processors
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


@pytest.mark.parametrize(
    ("make", "text", "environ", "words"),
    [
        # Processors are no substitute for accelerators that cannot be counted.
        (CLOSED, "auto", {}, ["may open none of its 8 GPUs", "write the number", "groups render and video"]),
        (CLOSED, "gpu", {}, ["cannot count GPUs", "may open none of its 8 GPUs", "write the number"]),
        (NVIDIA, "auto", {"CUDA_VISIBLE_DEVICES": "7"}, ["CUDA_VISIBLE_DEVICES='7' names none of the 3 NVIDIA GPUs"]),
        (lambda root: machines.accel(root, ["qaic"]), "auto", {}, ["the driver qaic", "write the number"]),
        (_npus, "gpu", {}, ["counts GPUs, and none could be opened on this machine"]),
        (NVIDIA, "gpu", {"CUDA_VISIBLE_DEVICES": "-1"}, ["none could be opened with CUDA_VISIBLE_DEVICES='-1'"]),
        (NVIDIA, "npu", {}, ["counts Ascend NPUs, and none could be opened"]),
        (NVIDIA, "tpus", {}, ["'tpus' is not a number", "cpu, gpu, xpu or auto", "npu"]),
    ],
)
def test_what_is_refused(
    tmp_path: Path, make: Callable[[Path], Path], text: str, environ: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(UserError) as refused:
        count_devices(text, environ, "--nproc-per-node", make(tmp_path))
    assert str(refused.value).startswith(f"--nproc-per-node={text}" if text != "tpus" else "--nproc-per-node='tpus'")
    for word in words:
        assert word in str(refused.value)


def test_none_are_none(tmp_path: Path) -> None:
    assert count_accelerators({}, "auto", tmp_path) == 0
