from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base import vendors
from rallypoint.base.devices import (
    Seen,
    best,
    cpu_count,
    cuda_count,
    cuda_devices,
    one_device_per_worker,
    seen,
    trouble_of,
)
from rallypoint.base.errors import UserError
from rallypoint.base.vendors import INTEL, VENDORS, Vendor
from tests import machines
from tests.machines import APU, MI300


def test_cpu_count_follows_affinity() -> None:
    allowed = os.sched_getaffinity(0)
    assert cpu_count() == len(allowed)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert cpu_count() == 1
    finally:
        os.sched_setaffinity(0, allowed)


# NVIDIA


@pytest.mark.parametrize(
    ("minors", "nodes", "count"),
    [
        ([], [], 0),
        ([0, 1, 2], [0, 1, 2], 3),
        ([0, 1, 2], [1], 1),  # a container with one GPU
        ([], [0, 1], 2),  # a sandbox that hides the driver's /proc
        ([0, 1], [], 2),
    ],
)
def test_gpus_of_a_machine(tmp_path: Path, minors: list[int], nodes: list[int], count: int) -> None:
    assert cuda_count({}, machines.nvidia(tmp_path, minors, nodes)) == count


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("2,0", 2),
        (" 1 , 2 ", 2),
        ("0,7,1", 1),  # nothing after an unknown number is used
        ("0,-1,1", 1),
        ("0,0", 0),
        ("NoDevFiles", 0),
        ("GPU-cccc", 1),
        ("GPU-aaaa,GPU-cccc", 2),
        ("GPU-aa", 0),  # ambiguous
        ("GPU-dddd", 0),
        ("1,GPU-aabb", 0),  # the same GPU twice
        ("MIG-1,MIG-2", 1),
    ],
)
def test_visible_devices(tmp_path: Path, visible: str, count: int) -> None:
    root = machines.nvidia(tmp_path, [0, 1, 2], [0, 1, 2])
    assert cuda_count({"CUDA_VISIBLE_DEVICES": visible}, root) == count


@given(st.text(alphabet="0123,-. GPUMIGabc", max_size=20), st.integers(0, 4), st.sampled_from(VENDORS))
def test_lists_select_present_devices(text: str, count: int, vendor: Vendor) -> None:
    devices = [vendors.Device(number=number) for number in range(count)]
    chosen = vendor.select(text, devices)
    assert len(chosen) == len(set(chosen))
    assert {*chosen} <= {*devices, vendors.Device()}  # a MIG instance, whose GPU is unknown
    assert {*vendor.per_worker} <= {*vendor.variables}


@pytest.mark.parametrize(
    ("visible", "addresses"),
    [
        (None, ["0000:00:00.0", "0000:01:00.0", "0000:02:00.0"]),
        ("2,0", ["0000:02:00.0", "0000:00:00.0"]),
        ("MIG-GPU-cccc3333-0000/1/0", ["0000:02:00.0"]),
        ("MIG-0b4c3a2f", [""]),  # without its GPU's name
    ],
)
def test_addresses_of_visible_devices(tmp_path: Path, visible: str | None, addresses: list[str]) -> None:
    root = machines.nvidia(tmp_path, [0, 1, 2], [0, 1, 2])
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [gpu.address for gpu in cuda_devices(environ, root)] == addresses


# Intel

CARDS = ["0000:00:02.0", "0000:29:00.0", "0000:3a:00.0"]
NODES = ["renderD128", "renderD129", "renderD130"]


@pytest.mark.parametrize("driver", ["i915", "xe"])
@pytest.mark.parametrize(
    ("addresses", "nodes", "mask", "count", "integrated"),
    [
        ([], [], None, 0, False),
        (CARDS, NODES, None, 2, False),  # the integrated GPU does not count beside cards
        (CARDS[:1], NODES, None, 1, True),
        (CARDS, NODES[:2], None, 1, False),  # a container with one card
        (CARDS, [], None, 0, False),
        (CARDS, NODES, "1", 1, False),
        (CARDS, NODES, "0.1, 0.0,1.1", 2, False),
        (CARDS, NODES, "7,x", 0, False),
        (CARDS, NODES, "", 2, False),
    ],
)
def test_xpus_of_a_machine(
    tmp_path: Path, driver: str, addresses: list[str], nodes: list[str], mask: str | None, count: int, integrated: bool
) -> None:
    root = machines.intel(tmp_path, addresses, nodes, driver)
    rows = seen({} if mask is None else {"ZE_AFFINITY_MASK": mask}, root, [INTEL])
    assert sum(len(row.devices) for row in rows) == count
    assert (best(rows) is None) == (integrated or count == 0)


@pytest.mark.parametrize(("hierarchy", "count"), [({}, 4), ({"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}, 2)])
def test_tiles_are_devices(tmp_path: Path, hierarchy: dict[str, str], count: int) -> None:
    (row,) = seen(hierarchy, machines.intel(tmp_path, CARDS[1:], NODES, tiles=2))
    assert len(row.devices) == count


# AMD


@pytest.mark.parametrize(
    ("environ", "numbers"),
    [
        ({}, [0, 1, 2, 3]),
        ({"ROCR_VISIBLE_DEVICES": "1,3"}, [1, 3]),
        ({"ROCR_VISIBLE_DEVICES": "1,3", "HIP_VISIBLE_DEVICES": "1"}, [3]),
        ({"ROCR_VISIBLE_DEVICES": f"GPU-{0xAB02:016x}"}, [2]),
        ({"HIP_VISIBLE_DEVICES": "2,0", "CUDA_VISIBLE_DEVICES": "1"}, [2, 0]),
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "0,9,1"}, [0]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_visible_amd_gpus(tmp_path: Path, environ: dict[str, str], numbers: list[int]) -> None:
    (row,) = seen(environ, machines.amd(tmp_path, [MI300] * 4, range(4)))
    assert [device.number for device in row.devices] == numbers
    assert [device.address for device in row.devices] == [f"0000:{number + 1:02}:00.0" for number in numbers]
    assert row.listed == 4
    assert not row.trouble


@pytest.mark.parametrize(
    ("gpus", "nodes", "refused", "count", "trouble"),
    [
        ([MI300] * 8, range(8), (), 8, ""),
        ([MI300] * 8, [2, 3], (), 2, ""),  # a container with two
        ([MI300] * 8, range(8), range(4, 8), 4, ""),  # the device cgroup refuses the others
        ([MI300] * 8, (), (), 0, "may not open any of its 8 GPUs"),
        ([], (), (), 0, ""),  # a driver without GPUs that compute
        ([APU], [0], (), 1, ""),
    ],
)
def test_amd_gpus_of_a_machine(
    tmp_path: Path, gpus: list[int], nodes: list[int], refused: list[int], count: int, trouble: str
) -> None:
    rows = seen({}, machines.amd(tmp_path, gpus, nodes, refused))
    assert sum(len(row.devices) for row in rows) == count
    assert trouble in trouble_of(rows, tmp_path)[0]
    assert bool(trouble) == bool(trouble_of(rows, tmp_path)[0])
    assert (best(rows) is None) == (APU in gpus or count == 0)


def test_devices_need_nodes_in_dev(tmp_path: Path) -> None:
    """A container without GPUs on a machine with GPUs."""
    machines.amd(tmp_path, [MI300] * 8, range(8))
    (tmp_path / "dev/kfd").unlink()
    assert seen({}, tmp_path) == []


# Others


def _nodes(*names: str) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        for name in names:
            machines.node(root, name)
        return root

    return make


TWO_TRAINIUMS: Callable[[Path], Path] = lambda root: machines.neuron(root, ["Trainium2"] * 2, 8)  # noqa: E731
TPUS: Callable[[Path], Path] = lambda root: machines.tpu(root, ["0x0063"] * 4 + ["0x0042"], range(5))  # noqa: E731


@pytest.mark.parametrize(
    ("name", "make", "environ", "numbers"),
    [
        ("NVIDIA", _nodes("nvgpu", "nvmap"), {}, [0]),  # Jetson
        ("Ascend", _nodes("davinci0", "davinci1", "davinci10", "davinci_manager"), {}, [0, 1, 10]),
        ("Ascend", _nodes("davinci0", "davinci1"), {"ASCEND_RT_VISIBLE_DEVICES": "1"}, [1]),
        ("Ascend", _nodes("davinci0", "davinci1"), {"ASCEND_RT_VISIBLE_DEVICES": "0, 1"}, [0]),
        ("Gaudi", lambda root: machines.accel(root, ["habanalabs"] * 3, {0: 5, 1: 4, 2: 7}), {}, [4, 5, 7]),
        (
            *("Gaudi", lambda root: machines.accel(root, ["habanalabs"] * 3, {0: 5, 1: 4, 2: 7})),
            *({"HABANA_VISIBLE_MODULES": "7,5,6"}, [7, 5]),
        ),
        ("AWS Neuron", TWO_TRAINIUMS, {}, [*range(8)]),
        ("AWS Neuron", TWO_TRAINIUMS, {"NEURON_LOGICAL_NC_CONFIG": "1"}, [*range(16)]),
        ("AWS Neuron", TWO_TRAINIUMS, {"NEURON_RT_VISIBLE_CORES": "0-2,6"}, [0, 1, 2, 6]),
        ("AWS Neuron", lambda root: machines.neuron(root, ["Trainium1"], 2), {}, [0, 1]),
        ("TPU", TPUS, {}, [0, 1, 2, 3]),
        ("TPU", TPUS, {"TPU_VISIBLE_CHIPS": "", "TPU_VISIBLE_DEVICES": "1,2"}, [1, 2]),
        ("TPU", _nodes("accel0", "accel1", "accel2", "accel3"), {"TPU_VISIBLE_CHIPS": "3"}, [3]),
        ("MetaX", lambda root: machines.metax(root, 2), {}, [0, 1]),
        ("MetaX", lambda root: machines.metax(root, 2), {"CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ("Iluvatar", _nodes("iluvatar0", "iluvatar3"), {"CUDA_VISIBLE_DEVICES": "1"}, [3]),
        ("Moore Threads", _nodes("mtgpu.0", "mtgpu.1"), {"MUSA_VISIBLE_DEVICES": "1,0"}, [1, 0]),
        ("Moore Threads", _nodes("mtgpu0"), {}, [0]),
        ("Cambricon", _nodes("cambricon_dev0", "cambricon_dev1", "cambricon_ctl"), {"MLU_VISIBLE_DEVICES": "1"}, [1]),
    ],
)
def test_other_vendors(
    tmp_path: Path, name: str, make: Callable[[Path], Path], environ: dict[str, str], numbers: list[int]
) -> None:
    (row,) = seen(environ, make(tmp_path))
    assert row.vendor.name == name
    assert [device.number for device in row.devices] == numbers
    assert not row.trouble
    assert best([row]) == row


@pytest.mark.parametrize(
    ("make", "trouble"),
    [
        (_nodes("nvidiactl"), "lists no GPU"),
        (_nodes("kfd"), "/sys/class/kfd is not visible"),
        (_nodes("mkfd"), "/dev/mkfd belongs to a driver of Hygon"),
        (_nodes("mxcd"), "this process may not open any of its GPUs"),
        (_nodes("neuron0"), "does not report how many logical cores"),
        (_nodes("accel/accel0"), "/dev/accel/accel0 belongs to an unknown driver"),
        (lambda root: machines.accel(root, ["qaic"]), "belongs to the driver qaic"),
        (lambda root: machines.tpu(root, ["0x0076"], [0]), "TPU v7"),
        (_nodes("gcu0"), "Enflame"),
        (_nodes("tenstorrent/0"), "Tenstorrent"),
    ],
)
def test_devices_that_cannot_be_counted(tmp_path: Path, make: Callable[[Path], Path], trouble: str) -> None:
    rows = seen({}, make(tmp_path))
    assert best(rows) is None
    assert trouble in trouble_of(rows, tmp_path)[0]


@pytest.mark.parametrize(
    "make",
    [
        _nodes("null", "dri/card0", "vfio/vfio"),
        lambda root: machines.accel(root, ["intel_vpu", "amdxdna"]),  # a notebook's
        lambda root: machines.tpu(root, ["0x0063"], []),  # in a container without the machine's chips
        _nodes("dxg"),  # always present in WSL
        lambda root: machines.amd(root, [APU], [0]),
        lambda root: machines.intel(root, CARDS[:1], NODES[:1]),
    ],
)
def test_machines_without_accelerators(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    rows = seen({}, make(tmp_path))
    assert best(rows) is None
    assert trouble_of(rows, tmp_path) == ("", "")


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (_nodes("davinci0", "davinci1"), "Ascend"),
        (_nodes("mtgpu.0"), "Moore Threads"),
        (_nodes("accel0"), "TPU"),
        (lambda root: machines.neuron(root, ["Trainium2"], 8), "Neuron"),
        (lambda root: machines.accel(root, ["habanalabs"]), "Gaudi"),
        (lambda root: machines.tpu(root, ["0x0063"], [0]), "TPU"),
        (lambda root: machines.intel(root, CARDS[1:], NODES), "Intel"),
        (lambda root: machines.metax(root, 1), "MetaX"),
        (lambda root: machines.amd(root, [MI300], [0]), "AMD"),
    ],
)
def test_devices_without_permission(
    tmp_path: Path, make: Callable[[Path], Path], names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make(tmp_path)
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)  # root may open anything
    rows = seen({}, root)
    assert best(rows) is None
    trouble, advice = trouble_of(rows, root)
    assert names in trouble
    assert advice


def test_a_list_without_matches_is_an_error(tmp_path: Path) -> None:
    root = machines.nvidia(tmp_path, [0, 1], [0, 1])

    def row(visible: str) -> Seen:
        (found,) = seen({"CUDA_VISIBLE_DEVICES": visible}, root)
        return found

    assert row("7").trouble == "CUDA_VISIBLE_DEVICES='7' names none of the 2 NVIDIA GPUs here"
    for hiding in ("", "-1", "NoDevFiles"):
        assert (row(hiding).devices, row(hiding).trouble) == ([], "")


# One device for each worker

HIP = ["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"]


def test_one_device_per_worker(tmp_path: Path) -> None:
    cuda, rocm = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"
    assert one_device_per_worker({}, 2, tmp_path) == [{cuda: "0"}, {cuda: "1"}]
    assert one_device_per_worker({cuda: "4, GPU-aa ,2"}, 2, tmp_path) == [{cuda: "4"}, {cuda: "GPU-aa"}]
    both = [{cuda: "6", rocm: "6"}, {cuda: "7", rocm: "7"}]
    assert one_device_per_worker({cuda: "4,5", rocm: "6, 7"}, 2, tmp_path) == both
    assert one_device_per_worker({cuda: "4", rocm: ""}, 1, tmp_path) == [{cuda: "4"}]
    amd = machines.amd(tmp_path / "amd", [MI300] * 4, range(4))
    for environ, root, error in (
        ({cuda: "4"}, tmp_path, "CUDA_VISIBLE_DEVICES='4', which lists 1 for 2 workers"),
        ({cuda: "4,5", rocm: "6"}, tmp_path, "HIP_VISIBLE_DEVICES='6', which lists 1 for 2 workers"),
        ({"ROCR_VISIBLE_DEVICES": "2"}, amd, "ROCR_VISIBLE_DEVICES='2', which lists 1 for 2"),
        ({"ZE_AFFINITY_MASK": "1"}, tmp_path / "none", "ZE_AFFINITY_MASK='1', which lists 1 for 2"),
    ):
        with pytest.raises(UserError, match=error):
            one_device_per_worker(environ, 2, root)


@pytest.mark.parametrize(
    ("make", "environ", "names", "values"),
    [
        # Without visible devices, as in a sandbox, the variables decide.
        (_nodes("null"), {"ZE_AFFINITY_MASK": "0.0,0.1"}, ["ZE_AFFINITY_MASK"], ["0.0", "0.1"]),
        (_nodes("null"), {"ASCEND_RT_VISIBLE_DEVICES": "4,5"}, ["ASCEND_RT_VISIBLE_DEVICES"], "45"),
        (_nodes("null"), {"NEURON_RT_VISIBLE_CORES": "2-3"}, ["NEURON_RT_VISIBLE_CORES"], "23"),
        (_nodes("null"), {"TPU_VISIBLE_DEVICES": "2,3"}, ["TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"], "23"),
        # Without variables, the devices decide.
        (lambda root: machines.intel(root, CARDS[1:], NODES), {}, ["ZE_AFFINITY_MASK"], "01"),
        (lambda root: machines.accel(root, ["habanalabs"] * 2, {0: 5, 1: 4}), {}, ["HABANA_VISIBLE_MODULES"], "45"),
        (lambda root: machines.amd(root, [MI300] * 2, [0, 1]), {}, HIP, "01"),
        # HIP_VISIBLE_DEVICES counts the devices in ROCR_VISIBLE_DEVICES.
        (lambda root: machines.amd(root, [MI300] * 4, range(4)), {"ROCR_VISIBLE_DEVICES": "2,3"}, HIP, "01"),
        # A stale list of another vendor does not matter; a container numbers its devices from 0.
        (_nodes("davinci4", "davinci5"), {"CUDA_VISIBLE_DEVICES": "0"}, ["ASCEND_RT_VISIBLE_DEVICES"], "01"),
    ],
)
def test_one_device_per_worker_of_each_vendor(
    tmp_path: Path, make: Callable[[Path], Path], environ: dict[str, str], names: list[str], values: Sequence[str]
) -> None:
    assert one_device_per_worker(environ, 2, make(tmp_path)) == [dict.fromkeys(names, value) for value in values]
