"""Detects which cluster has started this process (`--cluster=auto`), and whether it has started others too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rallypoint.clusters import kubernetes, mpi, slurm
from rallypoint.clusters.findings import Finding, Machine, Nothing

_FINDERS = {"slurm": slurm.find, "mpi": mpi.find, "k8s": kubernetes.find}


def find(which: str, environ: Mapping[str, str], machine: Machine) -> Finding:
    """Read the environment; `which` is slurm, mpi, k8s, or auto to detect it.

    Raises:
        UsageError: a variable has a value that its cluster does not give.
    """
    if which != "auto":
        return _FINDERS[which](environ, machine)
    # An MPI launcher first: inside a job of Slurm it starts its ranks by a step of its own, which is not theirs.
    if mpi.launcher_of(environ) is not None:
        return mpi.find(environ, machine)
    if "SLURM_JOB_ID" in environ or "SLURM_JOBID" in environ:
        return slurm.find(environ, machine)
    if "JOB_COMPLETION_INDEX" in environ:
        return kubernetes.find(environ, machine)
    return Nothing(
        "neither Slurm, nor an MPI launcher, nor an Indexed Job of Kubernetes has started this process",
        "give --nnodes and --rdzv-endpoint for a job of several nodes, or leave --cluster out",
    )


class Started(NamedTuple):
    """By whom this process was started beside others: for people, on how many nodes, and its number among them."""

    title: str
    nodes: int
    number: int
    flag: str


def started_with_others(environ: Mapping[str, str]) -> Started | None:
    """Whether the environment shows that this program was started on several nodes at once. Never raises."""

    def value(name: str) -> int:
        text = environ.get(name, "")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0

    launcher = mpi.launcher_of(environ)
    if launcher is not None:
        if value(launcher.size) > value(launcher.local_size) > 0:
            nodes = -(-value(launcher.size) // value(launcher.local_size))
            return Started(launcher.title, nodes, value(launcher.rank), "mpi")
        return None
    if value("SLURM_STEP_NUM_NODES") > 1 and "SLURM_PROCID" in environ:
        title = f"Slurm job {value('SLURM_JOB_ID')} step {value('SLURM_STEP_ID')}"
        return Started(title, value("SLURM_STEP_NUM_NODES"), value("SLURM_PROCID"), "slurm")
    if value("JOB_COMPLETIONS") > 1 and "JOB_COMPLETION_INDEX" in environ:
        return Started("the Indexed Job", value("JOB_COMPLETIONS"), value("JOB_COMPLETION_INDEX"), "k8s")
    return None
