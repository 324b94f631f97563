"""The domain of a node, from NVML (a stand-in) and Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from rallypoint.base.errors import UsageError
from rallypoint.base.nvml import nvml_fabrics
from rallypoint.clusters.topology import check_topology, find_domain, slurm_domain
from tests.nvml import compiled, needs_compiler

BLOCK = {"SLURM_TOPOLOGY_ADDR": "block-3.node7", "SLURM_TOPOLOGY_ADDR_PATTERN": "block.node"}


@pytest.mark.parametrize(
    ("address", "pattern", "name"),
    [
        ("root_switch.CELL1.leaf-3.belenos386", "switch.switch.switch.node", "leaf-3"),
        ("block-3.node7", "block.node", "block-3"),
        ("root.leaf.node7.example.org", "switch.switch.node", "leaf"),
        ("node7", "node", ""),
        ("node7.example.org", "node", ""),
        ("leaf.node7", "switch.switch.node", ""),
        ("", "", ""),
        ("leaf", "", ""),
        (f"{'x' * 256}.node7", "block.node", ""),
        ("a\nb.node7", "block.node", ""),
    ],
)
def test_slurm_domain(address: str, pattern: str, name: str) -> None:
    assert slurm_domain(address, pattern) == name


def test_check_topology() -> None:
    check_topology("rack 7", 2, 4)
    for name in ("a\tb", 256 * "x", 128 * "é", " rack"):
        with pytest.raises(UsageError, match="is not a valid name; use at most 255"):
            check_topology(name, 1, 1)
    with pytest.raises(UsageError, match="--segment=2 does not divide the minimum of --nnodes"):
        check_topology("", 2, 3)


_LIBRARY = """
#include <string.h>
struct fabric { unsigned char cluster[16]; unsigned status, clique; unsigned char state; };
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned n, void **handle) { *handle = (void *)(long)(n + 1); return 0; }
#ifndef OLD
int nvmlDeviceGetGpuFabricInfo(void *handle, struct fabric *info) {
    memset(info->cluster, CLUSTER, 16); info->status = STATUS; info->state = STATE;
    info->clique = (long)handle == 2 ? CLIQUE : 32766;
    return 0;
}
#endif
"""
_GIVEN = {"CLUSTER": "0xab", "STATUS": "0", "STATE": "3", "CLIQUE": "32766"}
_NAME = "abababab-abab-abab-abab-abababababab.32766"


@needs_compiler
@pytest.mark.parametrize(
    ("given", "fabrics", "domain"),
    [
        ({}, [_NAME, _NAME], (_NAME, "NVML")),
        ({"CLUSTER": "0"}, ["", ""], ("block-3", "SLURM_TOPOLOGY_ADDR")),
        ({"STATE": "2"}, ["", ""], ("block-3", "SLURM_TOPOLOGY_ADDR")),
        ({"STATUS": "15"}, ["", ""], ("block-3", "SLURM_TOPOLOGY_ADDR")),
        ({"OLD": "1"}, ["", ""], ("block-3", "SLURM_TOPOLOGY_ADDR")),
        ({"CLIQUE": "7"}, [_NAME, f"{_NAME[:36]}.7"], ("block-3", "SLURM_TOPOLOGY_ADDR")),
    ],
)
@pytest.mark.process
def test_find_domain(tmp_path: Path, given: dict[str, str], fabrics: list[str], domain: tuple[str, str]) -> None:
    library = compiled(tmp_path, _LIBRARY, *(f"-D{name}={value}" for name, value in (_GIVEN | given).items()))
    assert nvml_fabrics(library) == fabrics
    assert find_domain(BLOCK, library) == domain
    assert find_domain({}, str(tmp_path / "none.so")) is None
