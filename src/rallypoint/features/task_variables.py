"""Removes the variables that make a process a task of an MPI launcher from the workers' environment.

    started by         identity of this process            how it reaches its launcher
    -----------------  ----------------------------------  ------------------------------------------------
    Open MPI, PRRTE    PMIX_RANK, OMPI_COMM_WORLD_RANK     PMIX_SERVER_URI*, OMPI_MCA_orte_*
    Hydra, MVAPICH     PMI_RANK, MPI_LOCALRANKID, MV2_*    PMI_FD, a descriptor that no worker has
    PALS (Cray)        PALS_RANKID, PMI_RANK               PALS_*, PMI_CONTROL_PORT
    Flux               FLUX_TASK_RANK, PMI_RANK            PMI_FD
    srun --mpi=...     PMIX_RANK or PMI_RANK               SLURM_PMIX*, PMI_FD

The reason, for two workers below an `mpirun` that started one agent:

1. both inherit PMIX_RANK=0 and call MPI_Init, so two processes are rank 0 of 1;
2. one dies, and both are restarted;
3. MPI_Init asks the launcher for a rank that is already taken, and waits forever. With Hydra it fails immediately.

Without these variables, MPI_Init makes each worker its own world, as without an MPI launcher.

Workers keep variables for settings (`OMPI_MCA_btl`), compilers (`OMPI_CC`) and installations (`PMIX_HOME`). They also
keep Slurm's own variables, such as SLURM_PROCID: programs read them, and torchrun passes them on. With one task per
node, SLURM_PROCID is the node's number, even after a restart.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rallypoint.base.log import get_logger

if TYPE_CHECKING:
    from rallypoint.agent.launch import LaunchConfig
    from rallypoint.rendezvous.params import RendezvousParameters

_log = get_logger(__name__)

_PREFIXES = (
    *("PMIX_", "PMI_", "PMI2_", "OMPI_", "PRTE_", "HYDI_", "MV2_COMM_WORLD_", "PALS_"),
    *("SLURM_PMI", "FLUX_TASK_", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
)
_SETTINGS = re.compile(
    r"(?:OMPI|PMIX|PRTE)_MCA_(?!orte_|ess|pmix|plm|initial_wdir|num_procs|cpu_type|hwloc_base_|shmem_RUNTIME_|mpi_over)"
    r"|OMPI_(?:ALLOW_\w+|(?:CC|CXX|FC|F77|F90|MPICC|MPICXX|MPIFC)|(?:C|CXX|FC|F|CPP|LD)FLAGS|LIBS)$"
    r"|(?:OMPI|PMIX|PMI|PRTE)_(?:HOME|ROOT|DIR|PREFIX|INSTALL_PREFIX|LIB|INC|PATH)$"
)
"""Names that have one of the prefixes but are settings from a user or a module file."""

_RANKS = ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID", "FLUX_TASK_RANK")


def of_the_task(names: Iterable[str]) -> list[str]:
    """Those of the variables that make a process a task of an MPI launcher."""
    return sorted(name for name in names if name.startswith(_PREFIXES) and not _SETTINGS.match(name))


def take_away(config: LaunchConfig, _parameters: RendezvousParameters) -> None:
    """Remove the variables before a child inherits them; log this once for all tasks."""
    if _is_the_task(config, os.environ):
        return
    rank = next((os.environ[name] for name in _RANKS if name in os.environ), "0")
    names = of_the_task(os.environ)
    for name in names:
        del os.environ[name]
    say = _log.warning if rank == "0" else _log.info
    say(
        "workers do not inherit %s, which make this agent a task of its MPI launcher: MPI_Init in a worker would take "
        "the agent's place; use --worker-env=inherit to pass them on",
        _summary(names),
    )


def _is_the_task(config: LaunchConfig, environ: Mapping[str, str]) -> bool:
    """Whether the worker can be the task instead of this agent: it is the only worker, is never restarted, and
    reaches the launcher at an address.
    """
    return config.nproc_per_node == 1 and config.max_restarts == 0 and "PMI_FD" not in environ


def _summary(names: list[str]) -> str:
    """Summarize: `PMIX_RANK and 12 more`. The variable for the rank, if any, comes first."""
    shown = next((name for name in _RANKS if name in names), names[0])
    return shown if len(names) == 1 else f"{shown} and {len(names) - 1} more of its kind"
