"""MPI launchers: `mpirun` of Open MPI, and Hydra's, which MPICH, Intel MPI and others have.

Each rank is told how many there are, and how many on its host, but no rank is told where the others are: the user gives
the endpoint, unless there is only one.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from rallypoint.clusters.findings import MAX_NODES, Cluster, Finding, Machine, Nothing, Refusal, control_port, number


class Launcher(NamedTuple):
    """One family: how it is called, its variables, and the words with which it starts one rank on each host."""

    title: str
    size: str
    rank: str
    local_size: str
    one_per_host: str


_HYDRA = "mpiexec -ppn 1 -bind-to none"
LAUNCHERS = (
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "mpirun --map-by ppr:1:node --bind-to none",
    ),
    Launcher(
        "MVAPICH",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        _HYDRA,
    ),
    Launcher("Hydra", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", _HYDRA),
    Launcher("PMI", "PMI_SIZE", "PMI_RANK", "PMI_LOCAL_SIZE", "one process for each host"),
)
_NAME = re.compile(r"[\w.@:-]{1,120}", re.ASCII)


def launcher_of(environ: Mapping[str, str]) -> Launcher | None:
    """The launcher that has started this process, if it says enough for anybody to know."""
    for each in LAUNCHERS:
        if {each.size, each.rank, each.local_size} <= environ.keys():
            return each
    return None


def find(environ: Mapping[str, str], machine: Machine) -> Finding:
    launcher = launcher_of(environ)
    if launcher is None:
        return Nothing(
            "neither OMPI_COMM_WORLD_SIZE with OMPI_COMM_WORLD_LOCAL_SIZE, nor PMI_SIZE with MPI_LOCALNRANKS is set: "
            "no MPI launcher has started this process",
            f"write {LAUNCHERS[0].one_per_host} rallyrun ..., or {_HYDRA} rallyrun ...",
        )
    size = number(environ, launcher.size, 1, MAX_NODES)
    rank = number(environ, launcher.rank, 0, MAX_NODES - 1)
    here = number(environ, launcher.local_size, 1, MAX_NODES)
    if size is None or rank is None or here is None or rank >= size or here > size:
        return Refusal(
            f"{launcher.title} contradicts itself: {launcher.size}={size}, {launcher.rank}={rank}, "
            f"{launcher.local_size}={here}; give --nnodes, --node-rank and --rdzv-endpoint"
        )
    if here > 1:
        return Refusal(
            f"{launcher.title} has started {here} ranks on this host ({launcher.local_size}={here}), and rallyrun "
            f"starts the workers of a host itself; write {launcher.one_per_host} rallyrun --nproc-per-node={here} ..."
        )
    name = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or ""
    known = _NAME.fullmatch(name) is not None
    return Cluster(
        title=f"{launcher.title}, {size} rank{'' if size == 1 else 's'}",
        nodes=size,
        index=rank,
        host=machine.hostname if size == 1 else "",
        port=control_port(zlib.crc32(name.encode() if known else b""), ephemeral=machine.ephemeral)[0],
        hosts_here=size == 1,
        job_id=f"mpi-{name}" if known else "",
        unbind=f"write {launcher.one_per_host} rallyrun ...",
        wanted={
            "rdzv_endpoint": f"{launcher.title} does not say on which host rank 0 is; give it with a free port: "
            f"{launcher.one_per_host} rallyrun --cluster=mpi --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 ..."
        },
        origins={
            "nnodes": launcher.size,
            "node_rank": launcher.rank,
            "rdzv_endpoint": "--rdzv-endpoint (from the MPI launcher)",
            "rdzv_id": "the MPI launcher",
        },
    )
