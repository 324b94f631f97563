"""MPI launchers (`--cluster=mpi`): Open MPI's `mpirun`, Hydra's (in MPICH, Intel MPI and others), PALS' `mpiexec`, and
`jsrun`. Pure.

Each rank knows the number of ranks in total and on its host, but not where the others are. If a job of Slurm, PBS or
LSF lists as many hosts as there are ranks, each host has a rank, and so an agent: the nodes meet at the first host.
Otherwise the user must set the endpoint, unless there is only one rank.

Variables: Open MPI: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html; PALS:
https://github.com/SchedMD/slurm, src/plugins/mpi/cray_shasta, which sets the same; jsrun: LSFEnvironment in
https://lightning.ai/docs/fabric/stable/
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from rallypoint.clusters.batch import lsf_hosts, pbs_hosts
from rallypoint.clusters.findings import (
    Cluster,
    DetectionRefusal,
    Finding,
    Machine,
    NoCluster,
    name_of_job,
    number,
    usable,
)
from rallypoint.clusters.hostlist import HostlistError, expand
from rallypoint.clusters.ports import control_port
from rallypoint.control.protocol.ranges import MAX_NODES


class Launcher(NamedTuple):
    """One family: its name, its variables, and the command that starts one rank on each host."""

    title: str
    size: str
    rank: str
    local_size: str
    one_per_host: str


_HYDRA = "mpiexec -ppn 1 -bind-to none"
_OPEN_MPI = "mpirun --map-by ppr:1:node --bind-to none"
LAUNCHERS = (
    Launcher(  # before Open MPI, whose variables it may also set
        "jsrun",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
        "jsrun -r 1 -a 1 -c ALL_CPUS -g ALL_GPUS --bind=none",
    ),
    Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        _OPEN_MPI,
    ),
    Launcher(
        "MVAPICH",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        _HYDRA,
    ),
    Launcher("Hydra", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", _HYDRA),
    Launcher("PMI", "PMI_SIZE", "PMI_RANK", "PMI_LOCAL_SIZE", "mpiexec --ppn 1 --cpu-bind none"),
)


def launcher_of(environ: Mapping[str, str]) -> Launcher | None:
    """The launcher that started this process, if its variables are sufficient."""
    for launcher in LAUNCHERS:
        if {launcher.size, launcher.rank, launcher.local_size} <= environ.keys():
            return launcher
    return None


def of_mpi(environ: Mapping[str, str], machine: Machine) -> Finding:
    launcher = launcher_of(environ)
    if launcher is None:
        return NoCluster(
            "no MPI launcher started this process: neither OMPI_COMM_WORLD_SIZE with OMPI_COMM_WORLD_LOCAL_SIZE nor "
            "PMI_SIZE with MPI_LOCALNRANKS is set",
            f"use {_OPEN_MPI} rallyrun ..., or {_HYDRA} rallyrun ...",
        )
    size = number(environ, launcher.size, 1, MAX_NODES)
    rank = number(environ, launcher.rank, 0, MAX_NODES - 1)
    here = number(environ, launcher.local_size, 1, MAX_NODES)
    if size is None or rank is None or here is None or rank >= size or here > size:
        return DetectionRefusal(
            f"the variables of {launcher.title} are inconsistent: {launcher.size}={size}, {launcher.rank}={rank}, "
            f"{launcher.local_size}={here}; set --nnodes, --node-rank and --rdzv-endpoint"
        )
    if here > 1:
        return DetectionRefusal(
            f"{launcher.title} started {here} ranks on this host ({launcher.local_size}={here}), but rallyrun starts "
            f"the workers of a host itself; use {launcher.one_per_host} rallyrun --nproc-per-node={here} ..."
        )
    name = name_of_job(environ, "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    hosts = [machine.hostname] if size == 1 else _hosts_of_the_batch_job(environ, machine)
    if launcher.title == "jsrun" and len(hosts) == size + 1:
        del hosts[0]  # the batch script's host, on which jsrun starts nothing
    key = name or next(filter(None, map(environ.get, _BATCH_JOBS)), "")
    return Cluster(
        title=f"{launcher.title}, {size} rank{'' if size == 1 else 's'}",
        nodes=size,
        index=rank,
        host=hosts[0] if len(hosts) == size else "",
        port=control_port(zlib.crc32(key.encode(errors="replace")), ephemeral=machine.ephemeral)[0],
        hosts_here=size == 1,
        job_id=f"mpi-{name}" if name else "",
        unbind=f"use {launcher.one_per_host} rallyrun ...",
        wanted={
            "rdzv_endpoint": f"the host of rank 0 of {launcher.title} is unknown; set it with a free port: "
            f"{launcher.one_per_host} rallyrun --cluster=mpi --rdzv-backend=c10d "
            "--rdzv-endpoint=HOST:29400 ..."
        },
        origins={
            "nnodes": launcher.size,
            "node_rank": launcher.rank,
            "rdzv_endpoint": "--rdzv-endpoint (from the MPI launcher)",
            "rdzv_id": "the MPI launcher",
        },
    )


_BATCH_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")


def _hosts_of_the_batch_job(environ: Mapping[str, str], machine: Machine) -> list[str]:
    """The hosts of the batch job in which the launcher runs, in its order; empty if unknown."""
    if "SLURM_JOB_ID" in environ:
        with suppress(HostlistError):
            return usable(expand(environ.get("SLURM_JOB_NODELIST", "")))
    if "PBS_JOBID" in environ:
        return pbs_hosts(machine)
    return lsf_hosts(environ)
