from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.devices import cpu_count, cuda_count

_UUIDS = ["GPU-aaaa1111-0000", "GPU-aabb2222-0000", "GPU-cccc3333-0000"]


def _machine(root: Path, minors: list[int], nodes: list[int], uuids: list[str] = _UUIDS) -> Path:
    """A root folder as the NVIDIA driver lays it out, for GPUs with these device minors."""
    for minor in minors:
        folder = root / f"proc/driver/nvidia/gpus/0000:{minor:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(
            f"Model: \t\t NVIDIA H100\nIRQ:   \t\t 183\nGPU UUID: \t {uuids[minor]}\nDevice Minor: \t {minor}\n"
        )
    (root / "dev").mkdir(parents=True)
    for name in [f"nvidia{node}" for node in nodes] + ["nvidiactl", "nvidia-uvm"]:
        (root / "dev" / name).touch()
    return root


def test_cpu_count_honours_affinity() -> None:
    allowed = os.sched_getaffinity(0)
    assert cpu_count() == len(allowed)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert cpu_count() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(
    ("minors", "nodes", "count"),
    [
        ([], [], 0),
        ([0, 1, 2], [0, 1, 2], 3),
        ([0, 1, 2], [1], 1),  # a container that was given one GPU
        ([], [0, 1], 2),  # a sandbox that hides the driver's /proc
        ([0, 1], [], 2),
    ],
)
def test_gpus_of_a_machine(tmp_path: Path, minors: list[int], nodes: list[int], count: int) -> None:
    assert cuda_count({}, _machine(tmp_path, minors, nodes)) == count


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("2,0", 2),
        (" 1 , 2 ", 2),
        ("0,7,1", 1),  # what stands after a number that does not exist is not seen
        ("0,-1,1", 1),
        ("0,0", 0),
        ("NoDevFiles", 0),
        ("GPU-cccc", 1),
        ("GPU-aaaa,GPU-cccc", 2),
        ("GPU-aa", 0),  # fits two
        ("GPU-dddd", 0),
        ("1,GPU-aabb", 0),  # the same one twice
        ("MIG-1,MIG-2", 1),
    ],
)
def test_visible_devices(tmp_path: Path, visible: str, count: int) -> None:
    root = _machine(tmp_path, [0, 1, 2], [0, 1, 2])
    assert cuda_count({"CUDA_VISIBLE_DEVICES": visible}, root) == count


@given(st.text(alphabet="0123,- GPUMIGabc", max_size=20))
def test_never_more_than_there_are(visible: str) -> None:
    assert cuda_count({"CUDA_VISIBLE_DEVICES": visible}, Path("/nonexistent")) == 0
