from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.errors import UserError
from rallypoint.base.numa import (
    AffinityMode,
    Cpus,
    CpuTopology,
    NumaOptions,
    bindings,
    format_cpus,
    parse_cpus,
    read_topology,
    worker_cpus,
)
from tests import machines
from tests.machines import MI300


def cpus(text: str) -> Cpus:
    return parse_cpus(text)


# Two sockets with two nodes each; a node has 4 cores of 2 threads; 2 cores share a cache. n and n + 16 are one core.
NODES = {0: cpus("0-3,16-19"), 1: cpus("4-7,20-23"), 2: cpus("8-11,24-27"), 3: cpus("12-15,28-31")}
MACHINE = CpuTopology(
    nodes=NODES,
    gpu_nodes=(0, 0, 0, 2),
    packages={0: 0, 1: 0, 2: 1, 3: 1},
    cores={cpu: frozenset({cpu % 16, cpu % 16 + 16}) for cpu in range(32)},
    caches={cpu: cpus(f"{low}-{low + 1},{low + 16}-{low + 17}") for cpu in range(32) for low in [cpu % 16 // 2 * 2]},
)
ALL = cpus("0-31")


@pytest.mark.parametrize(
    ("mode", "allowed", "expected"),
    [
        (AffinityMode.NODE, "0-31", ["0-3,16-19"] * 3 + ["8-11,24-27"]),
        (AffinityMode.NODE, "1-9", ["1-3"] * 3 + ["8-9"]),
        (AffinityMode.SOCKET, "0-31", ["0-7,16-23"] * 3 + ["8-15,24-31"]),
        (AffinityMode.SOCKET, "7,12", ["7"] * 3 + ["12"]),
        # 4 cores for 3 GPUs: the first gets one more.
        (AffinityMode.EXCLUSIVE, "0-31", ["0-1,16-17", "2,18", "3,19", "8-11,24-27"]),
        # Part of a core counts as a core: 0 without 16, 17 without 1. Cores are sorted by their lowest processor.
        (AffinityMode.EXCLUSIVE, "0,2,17-18,9", ["0", "2,18", "17", "9"]),
        (AffinityMode.CORE_COMPLEX, "0-31", ["0-1,16-17", "2-3,18-19", "0-1,16-17", "8-9,24-25"]),
        # The group with more processors comes first.
        (AffinityMode.CORE_COMPLEX, "1-31", ["2-3,18-19", "1,16-17", "2-3,18-19", "8-9,24-25"]),
    ],
)
def test_modes(mode: AffinityMode, allowed: str, expected: list[str]) -> None:
    found = [format_cpus(binding) for binding in bindings(mode, MACHINE, cpus(allowed), 4)]
    assert found == expected


@pytest.mark.parametrize(
    ("mode", "allowed", "workers", "error"),
    [
        (AffinityMode.NODE, "0-31", 5, "5 workers .* 4 GPUs"),
        (AffinityMode.NODE, "4-15", 1, "worker 0 would have no processor.*NUMA node 0"),
        (AffinityMode.SOCKET, "0-7", 4, "worker 3 would have no processor.*NUMA node 2"),
        (AffinityMode.EXCLUSIVE, "0,1,17", 1, "NUMA node 0 has 2 cores.*3 GPUs"),
        (AffinityMode.CORE_COMPLEX, "31", 1, "worker 0 would have no processors"),
    ],
)
def test_impossible_bindings(mode: AffinityMode, allowed: str, workers: int, error: str) -> None:
    with pytest.raises(UserError, match=error):
        bindings(mode, MACHINE, cpus(allowed), workers)


@given(mode=st.sampled_from(AffinityMode), allowed=st.frozensets(st.integers(0, 40)), workers=st.integers(1, 4))
def test_laws(mode: AffinityMode, allowed: Cpus, workers: int) -> None:
    try:
        found = bindings(mode, MACHINE, allowed, workers)
    except UserError:
        return
    assert len(found) == workers
    assert all(binding and binding <= allowed for binding in found)
    if mode is AffinityMode.EXCLUSIVE:
        assert sum(map(len, found)) == len(frozenset().union(*found))
        if workers == 4:
            assert frozenset().union(*found) == (NODES[0] | NODES[2]) & allowed


@given(st.frozensets(st.integers(0, 300)))
def test_parse_and_format(some: Cpus) -> None:
    assert parse_cpus(format_cpus(some) + "\n") == some


def test_options() -> None:
    assert NumaOptions(AffinityMode("core-complex")).affinity_mode is AffinityMode.CORE_COMPLEX
    with pytest.raises(UserError, match=r"'moon'.*node, socket, exclusive, core-complex"):
        NumaOptions("moon")


# Reading folders as the kernel lays them out


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text + "\n")


def machine(root: Path, gpu_nodes: list[int]) -> Path:
    """Write MACHINE as files, with GPUs on these nodes."""
    for node, own in MACHINE.nodes.items():
        write(root, f"sys/devices/system/node/node{node}/cpulist", format_cpus(own))
        for cpu in own:
            folder = f"sys/devices/system/cpu/cpu{cpu}"
            write(root, f"{folder}/topology/physical_package_id", str(MACHINE.packages[node]))
            write(root, f"{folder}/topology/thread_siblings_list", format_cpus(MACHINE.cores[cpu]))
            levels = [(1, "Data", MACHINE.cores), (1, "Instruction", MACHINE.cores), (3, "Unified", MACHINE.caches)]
            for index, (level, kind, sharing) in enumerate(levels):
                write(root, f"{folder}/cache/index{index}/level", str(level))
                write(root, f"{folder}/cache/index{index}/type", kind)
                write(root, f"{folder}/cache/index{index}/shared_cpu_list", format_cpus(sharing[cpu]))
    (root / "dev").mkdir(parents=True, exist_ok=True)
    for number, node in enumerate(gpu_nodes):
        address = f"0000:{number + 1:02x}:00.0"
        write(root, f"sys/bus/pci/devices/{address}/numa_node", str(node))
        write(root, f"proc/driver/nvidia/gpus/{address}/information", f"GPU UUID: GPU-{number}\nDevice Minor: {number}")
        (root / f"dev/nvidia{number}").touch()
    return root


@pytest.mark.parametrize("mode", AffinityMode)
def test_read_topology(tmp_path: Path, mode: AffinityMode) -> None:
    root = machine(tmp_path, [-1, 0, 0, 2])
    addresses = [f"0000:{number:02x}:00.0" for number in range(1, 5)]
    assert bindings(mode, read_topology(mode, addresses, root), ALL, 4) == bindings(mode, MACHINE, ALL, 4)


def test_a_kernel_without_numa(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"0000:01:00\.0/numa_node \(No such file"):
        read_topology(AffinityMode.NODE, ["0000:01:00.0"], tmp_path)
    write(tmp_path, "sys/devices/system/cpu/online", "0-3")
    write(tmp_path, "sys/bus/pci/devices/0000:01:00.0/numa_node", "-1")
    topology = read_topology(AffinityMode.NODE, ["0000:01:00.0"], tmp_path)
    assert bindings(AffinityMode.NODE, topology, cpus("2-9"), 1) == [cpus("2-3")]


@pytest.mark.parametrize(
    ("visible", "error"),
    [("", "this machine has none with CUDA_VISIBLE_DEVICES=''"), ("MIG-1", "driver does not report")],
)
def test_fallback(tmp_path: Path, visible: str, error: str, caplog: pytest.LogCaptureFixture) -> None:
    root, environ = machine(tmp_path, [0, 0]), {"CUDA_VISIBLE_DEVICES": visible}
    with pytest.raises(UserError, match=error):
        worker_cpus(NumaOptions(AffinityMode.NODE), 1, environ, root)
    assert worker_cpus(NumaOptions(AffinityMode.NODE, True), 1, environ, root) is None
    assert error in caplog.text


def test_workers_are_bound_near_their_devices(tmp_path: Path) -> None:
    root = machine(tmp_path / "nvidia", [3, 0])  # processor 0, which this process may use, is on node 0
    allowed = frozenset(os.sched_getaffinity(0))
    options = NumaOptions(AffinityMode.NODE)
    assert worker_cpus(options, 1, {"CUDA_VISIBLE_DEVICES": "1"}, root) == [NODES[0] & allowed]
    root = machines.amd(machine(tmp_path / "amd", []), [MI300] * 2, [0, 1])
    for number, node in enumerate([3, 0]):
        write(root, f"sys/bus/pci/devices/0000:{number + 1:02x}:00.0/numa_node", str(node))
    assert worker_cpus(options, 1, {"HIP_VISIBLE_DEVICES": "1"}, root) == [NODES[0] & allowed]
    machines.node(machine(tmp_path / "ascend", []), "davinci0")
    with pytest.raises(UserError, match="does not report the PCI addresses of the Ascend NPUs"):
        worker_cpus(options, 1, {}, tmp_path / "ascend")
    machines.node(machine(tmp_path / "metax", []), "mxcd")
    with pytest.raises(UserError, match="this process may not open any of its GPUs"):
        worker_cpus(options, 1, {}, tmp_path / "metax")


BOUND_APART = """
import os, threading
from rallypoint.base.numa import bind_this_process
here = os.sched_getaffinity(0)
if len(here) > 1:
    first, second = sorted(here)[:2]
    there, done = threading.Event(), threading.Event()
    seen = {}
    def run(name, cpus):
        if cpus: os.sched_setaffinity(0, cpus)
        there.set(); done.wait(); seen[name] = os.sched_getaffinity(0)
    threads = []
    for name, cpus in (("apart", {second}), ("along", None)):
        there.clear()
        threads.append(threading.Thread(target=run, args=(name, cpus)))
        threads[-1].start(); there.wait()
    bind_this_process(frozenset({first}))
    done.set()
    for thread in threads: thread.join()
    assert os.sched_getaffinity(0) == {first} == seen["along"], seen
    assert seen["apart"] == {second}, seen
"""


@pytest.mark.process
def test_threads_bound_separately_stay_bound() -> None:
    subprocess.run([sys.executable, "-c", BOUND_APART], check=True)
