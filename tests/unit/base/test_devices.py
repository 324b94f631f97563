from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.devices import cpu_count, cuda_count, cuda_devices, one_gpu_per_worker, xpu_count
from rallypoint.base.errors import UserError

_UUIDS = ["GPU-aaaa1111-0000", "GPU-aabb2222-0000", "GPU-cccc3333-0000"]


def _machine(root: Path, minors: list[int], nodes: list[int]) -> Path:
    """A root folder as the NVIDIA driver lays it out, for GPUs with these device minors."""
    for minor in minors:
        folder = root / f"proc/driver/nvidia/gpus/0000:{minor:02x}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(
            f"Model: \t\t NVIDIA H100\nIRQ:   \t\t 183\nGPU UUID: \t {_UUIDS[minor]}\nDevice Minor: \t {minor}\n"
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


@pytest.mark.parametrize(
    ("visible", "addresses"),
    [
        (None, ["0000:00:00.0", "0000:01:00.0", "0000:02:00.0"]),
        ("2,0", ["0000:02:00.0", "0000:00:00.0"]),
        ("MIG-GPU-cccc3333-0000/1/0", ["0000:02:00.0"]),
        ("MIG-0b4c3a2f", [""]),  # a name that has no GPU
    ],
)
def test_where_the_visible_devices_are(tmp_path: Path, visible: str | None, addresses: list[str]) -> None:
    root = _machine(tmp_path, [0, 1, 2], [0, 1, 2])
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [gpu.address for gpu in cuda_devices(environ, root)] == addresses


def _intel(root: Path, addresses: list[str], nodes: list[str], driver: str = "xe") -> Path:
    """A root folder with Intel GPUs at these addresses, the first of which is `renderD128`."""
    for number, address in enumerate(addresses):
        (root / f"sys/bus/pci/drivers/{driver}/{address}/drm/card{number}").mkdir(parents=True)
        (root / f"sys/bus/pci/drivers/{driver}/{address}/drm/renderD{128 + number}").mkdir()
    (root / f"sys/bus/pci/drivers/{driver}/module").mkdir(parents=True)
    (root / "dev/dri").mkdir(parents=True)
    for node in nodes:
        (root / "dev/dri" / node).touch()
    return root


CARDS = ["0000:00:02.0", "0000:29:00.0", "0000:3a:00.0"]
NODES = ["renderD128", "renderD129", "renderD130"]


@pytest.mark.parametrize("driver", ["i915", "xe"])
@pytest.mark.parametrize(
    ("addresses", "nodes", "mask", "count", "cards"),
    [
        ([], [], None, 0, 0),
        (CARDS, NODES, None, 2, 2),  # the one in the processor does not count beside cards
        (CARDS[:1], NODES, None, 1, 0),
        (CARDS, NODES[:2], None, 1, 1),  # a container that was given one card
        (CARDS, [], None, 0, 0),
        (CARDS, NODES, "1", 1, 1),
        (CARDS, NODES, "0.1, 0.0,1.1", 2, 2),
        (CARDS, NODES, "7,x", 0, 0),
        (CARDS, NODES, "", 2, 2),
    ],
)
def test_xpus_of_a_machine(
    tmp_path: Path, driver: str, addresses: list[str], nodes: list[str], mask: str | None, count: int, cards: int
) -> None:
    root = _intel(tmp_path, addresses, nodes, driver)
    environ = {} if mask is None else {"ZE_AFFINITY_MASK": mask}
    assert xpu_count(environ, root) == count
    assert xpu_count(environ, root, integrated=False) == cards


def test_each_worker_gets_one_device() -> None:
    cuda, rocm = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
    assert one_gpu_per_worker({}, 2) == [{cuda: "0"}, {cuda: "1"}]
    assert one_gpu_per_worker({cuda: "4, GPU-aa ,2"}, 2) == [{cuda: "4"}, {cuda: "GPU-aa"}]
    assert one_gpu_per_worker({cuda: "4,5", rocm: "6, 7"}, 2) == [{cuda: "6", rocm: "6"}, {cuda: "7", rocm: "7"}]
    assert one_gpu_per_worker({cuda: "4", rocm: ""}, 1) == [{cuda: "4"}]
    with pytest.raises(UserError, match=r"CUDA_VISIBLE_DEVICES='4', which names 1 for 2 workers"):
        one_gpu_per_worker({cuda: "4"}, 2)
    with pytest.raises(UserError, match=r"HIP_VISIBLE_DEVICES='6', which names 1 for 2 workers"):
        one_gpu_per_worker({cuda: "4,5", rocm: "6"}, 2)
