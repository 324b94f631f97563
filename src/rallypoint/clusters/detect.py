"""Detects which cluster started this process (`--cluster`), and whether it started others too. Pure.

Variables of several clusters may be set at once. The cluster that started this very process counts, so `auto` checks
`FAMILIES` in order, from the innermost to the outermost:

    an MPI launcher        starts its ranks inside any other cluster, in a step or task of its own
    SkyPilot, dstack       start a task on each machine of a cloud, of Slurm or of Kubernetes, with their own variables
    SageMaker, Azure ML    do so in their containers; Volcano on Kubernetes schedules the pods of Azure ML
    Volcano                its pods may also get an index from Kubernetes
    Flux                   runs its instance as one job of Slurm or LSF, whose variables its tasks may inherit
    Slurm                  its compatibility commands set PBS variables
    PBS, LSF               are never found inside each other
    Kubernetes             everything that runs in a pod sees its index
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from rallypoint.clusters.batch import of_flux, of_lsf, of_pbs
from rallypoint.clusters.findings import Finding, Machine, NoCluster
from rallypoint.clusters.kubernetes import is_of_volcano, of_kubernetes, of_volcano
from rallypoint.clusters.mpi import launcher_of, of_mpi
from rallypoint.clusters.platforms import (
    DSTACK,
    SAGEMAKER_FILE,
    SKYPILOT,
    of_azureml,
    of_dstack,
    of_sagemaker,
    of_skypilot,
)
from rallypoint.clusters.slurm import of_slurm


class Family(NamedTuple):
    """Clusters that describe a job in the same variables: the value of `--cluster`, a name for messages, a test of the
    environment, and a function that reads it.
    """

    flag: str
    title: str
    is_there: Callable[[Mapping[str, str]], bool]
    find: Callable[[Mapping[str, str], Machine], Finding]


def _has(*names: str) -> Callable[[Mapping[str, str]], bool]:
    return lambda environ: any(name in environ for name in names)


FAMILIES = (
    Family("mpi", "an MPI launcher", lambda environ: launcher_of(environ) is not None, of_mpi),
    Family("skypilot", "SkyPilot", _has(SKYPILOT.rank), of_skypilot),
    Family("dstack", "dstack", _has(DSTACK.rank), of_dstack),
    Family("sagemaker", "SageMaker", _has("SM_HOSTS", "SM_RESOURCE_CONFIG", "TRAINING_JOB_NAME"), of_sagemaker),
    Family("azureml", "Azure ML", _has("AZUREML_RUN_ID", "AZUREML_NODE_COUNT"), of_azureml),
    Family("volcano", "Volcano", is_of_volcano, of_volcano),
    Family("flux", "Flux", _has("FLUX_TASK_RANK", "FLUX_URI"), of_flux),
    Family("slurm", "Slurm", _has("SLURM_JOB_ID", "SLURM_JOBID"), of_slurm),
    Family("pbs", "PBS", _has("PBS_JOBID"), of_pbs),
    Family("lsf", "LSF", _has("LSB_JOBID"), of_lsf),
    Family("k8s", "an Indexed Job of Kubernetes", _has("JOB_COMPLETION_INDEX"), of_kubernetes),
)


def find(which: str, environ: Mapping[str, str], machine: Machine) -> Finding:
    """Read the environment; `which` is the flag of a family, or auto to detect it. Raises UsageError: a variable has a
    value that its cluster never sets.
    """
    for family in FAMILIES:
        if family.flag == which or (which == "auto" and family.is_there(environ)):
            return family.find(environ, machine)
    names = ", ".join(family.title for family in FAMILIES)
    return NoCluster(
        f"no known cluster started this process ({names})",
        "set --nnodes and --rdzv-endpoint for a job on several nodes, or remove --cluster",
    )


def job_file(environ: Mapping[str, str]) -> str:
    """The path of the file in which the cluster describes the job; empty if its variables do."""
    if "PBS_JOBID" in environ:
        return environ.get("PBS_NODEFILE", "")
    return SAGEMAKER_FILE if "TRAINING_JOB_NAME" in environ else ""


class Started(NamedTuple):
    """The launcher that started this process and others: its name, the number of nodes, and this process's number."""

    title: str
    nodes: int
    number: int
    flag: str


_COUNTED = (
    ("the SkyPilot task", SKYPILOT.nodes, SKYPILOT.rank, "skypilot"),
    ("the dstack run", DSTACK.nodes, DSTACK.rank, "dstack"),
    ("the Flux job", "FLUX_JOB_NNODES", "FLUX_TASK_RANK", "flux"),
    ("the Indexed Job", "JOB_COMPLETIONS", "JOB_COMPLETION_INDEX", "k8s"),
)
"""Clusters that tell each node its number and how many there are: name, the two variables, and the flag."""


def started_with_others(environ: Mapping[str, str]) -> Started | None:
    """Whether the environment shows that this program was started on several nodes at once. Never raises."""

    def value(name: str) -> int:
        text = environ.get(name, "")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0

    launcher = launcher_of(environ)
    if launcher is not None:
        if value(launcher.size) > value(launcher.local_size) > 0:
            nodes = -(-value(launcher.size) // value(launcher.local_size))
            return Started(launcher.title, nodes, value(launcher.rank), "mpi")
        return None
    if value("SLURM_STEP_NUM_NODES") > 1 and "SLURM_PROCID" in environ and "FLUX_TASK_RANK" not in environ:
        title = f"Slurm job {value('SLURM_JOB_ID')} step {value('SLURM_STEP_ID')}"
        return Started(title, value("SLURM_STEP_NUM_NODES"), value("SLURM_PROCID"), "slurm")
    for title, count, rank, flag in _COUNTED:
        if value(count) > 1 and rank in environ:
            return Started(title, value(count), value(rank), flag)
    return None
