"""Slurm (`--cluster=slurm`): the step that `srun` started, in which this process is its node's only task. Pure.

Laws:

1. For nodes and hosts, use only the step's variables: the job's list all nodes of the allocation.
2. Node 0 of the step is the first host in its list, whatever the order of the tasks (`--distribution=arbitrary`).
3. The id contains the job, the step and how often the job was requeued, so leftovers of an earlier run belong to
   another job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rallypoint.clusters.findings import (
    MAX_CPUS,
    MAX_GPUS,
    MAX_ID,
    Cluster,
    DetectionRefusal,
    Finding,
    Machine,
    NoCluster,
    is_host_name,
    number,
)
from rallypoint.clusters.hostlist import HostlistError, expand
from rallypoint.clusters.ports import control_port
from rallypoint.control.protocol.ranges import MAX_NODES

_SPECIAL_STEP = 0xFFFFFFF0
"""From this number on, steps are the batch script, an interactive shell, and processes from elsewhere."""
_SRUN = "srun --ntasks-per-node=1 rallyrun ..."
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", re.ASCII)


def of_slurm(environ: Mapping[str, str], machine: Machine) -> Finding:
    job = number(environ, "SLURM_JOB_ID", 1, MAX_ID) or number(environ, "SLURM_JOBID", 1, MAX_ID)
    if job is None:
        return NoCluster("Slurm did not start this process: SLURM_JOB_ID is not set", f"use {_SRUN}")
    step = number(environ, "SLURM_STEP_ID", 0, MAX_ID)
    if step is None:
        step = number(environ, "SLURM_STEPID", 0, MAX_ID)
    if step is None or step >= _SPECIAL_STEP or "SLURM_PROCID" not in environ:
        return _outside_a_step(environ, job)
    return _of_a_step(environ, machine, job, step)


def _outside_a_step(environ: Mapping[str, str], job: int) -> Finding:
    """Judge a batch script or a shell (salloc, ssh), where srun has not started one agent per node."""
    nodes = number(environ, "SLURM_JOB_NUM_NODES", 1, MAX_NODES) or number(environ, "SLURM_NNODES", 1, MAX_NODES)
    if nodes is None:
        return NoCluster(
            f"srun did not start this process in Slurm job {job} (SLURM_STEP_ID and SLURM_JOB_NUM_NODES are not set, "
            "as after ssh to one of its nodes)",
            f"use {_SRUN} to run on all nodes of the job",
        )
    if nodes > 1:
        return DetectionRefusal(
            f"Slurm job {job} has {nodes} nodes, but this process was started without srun, on one of them; use "
            f"{_SRUN} to run on all nodes, or --standalone to run on this one"
        )
    return Cluster(title=f"Slurm job {job}", nodes=1, index=0, gpus=_gpus(environ), cpus=_cpus(environ))


def _of_a_step(environ: Mapping[str, str], machine: Machine, job: int, step: int) -> Finding:
    title = f"Slurm job {job} step {step}"
    nodes = number(environ, "SLURM_STEP_NUM_NODES", 1, MAX_NODES)
    index = number(environ, "SLURM_NODEID", 0, MAX_NODES - 1)
    names = environ.get("SLURM_STEP_NODELIST", "")
    values = {"SLURM_STEP_NUM_NODES": nodes, "SLURM_NODEID": index, "SLURM_STEP_NODELIST": names or None}
    missing = [name for name, value in values.items() if value is None]
    if nodes is None or index is None or not names:
        return DetectionRefusal(
            f"the hosts of {title} are unknown: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not "
            "set; pass on Slurm's variables (a container or `env -i` can drop them), or set --nnodes, --node-rank "
            "and --rdzv-endpoint"
        )
    try:
        hosts = expand(names)
    except HostlistError as error:
        return DetectionRefusal(
            f"SLURM_STEP_NODELIST={names[:120]!r} is not a valid list of hosts: {error}; set --rdzv-endpoint"
        )
    if len(hosts) != nodes or index >= nodes or not is_host_name(hosts[0]):
        return DetectionRefusal(
            f"the variables of {title} are inconsistent: SLURM_STEP_NODELIST={names[:120]!r} lists {len(hosts)} "
            f"hosts, SLURM_STEP_NUM_NODES={nodes}, SLURM_NODEID={index}; set --nnodes, --node-rank and --rdzv-endpoint"
        )
    if (most := _most_tasks(environ)) > 1:
        return DetectionRefusal(
            f"{title} has {most} tasks per node "
            f"(SLURM_STEP_TASKS_PER_NODE={environ['SLURM_STEP_TASKS_PER_NODE'][:60]}), but rallyrun starts the workers "
            "of a node itself; use srun --ntasks-per-node=1, and set --nproc-per-node to the number of workers"
        )
    return _cluster(environ, machine, (job, step, index), hosts, title)


def _cluster(
    environ: Mapping[str, str], machine: Machine, numbers: tuple[int, int, int], hosts: list[str], title: str
) -> Cluster:
    job, step, index = numbers
    restarts = number(environ, "SLURM_RESTART_COUNT", 0, 1 << 20) or 0
    port, is_outside = control_port(job, step, restarts, machine.ephemeral)
    here = environ.get("SLURMD_NODENAME")
    return Cluster(
        title=title,
        nodes=len(hosts),
        index=index,
        host=hosts[0],
        port=port,
        job_id=f"slurm-{job}.{step}.{restarts}",
        hosts_here=index == 0 if here is None else here == hosts[0],
        gpus=_gpus(environ),
        cpus=_cpus(environ),
        origins={
            "nnodes": "SLURM_STEP_NUM_NODES",
            "node_rank": "SLURM_NODEID",
            "rdzv_endpoint": "--rdzv-endpoint (from SLURM_STEP_NODELIST)",
            "rdzv_id": "SLURM_JOB_ID",
        },
        unbind="use srun --cpus-per-task=N or --cpu-bind=none",
        remark="" if is_outside else _NO_ROOM.format(port=port, text=machine.ephemeral.strip()[:40]),
    )


_NO_ROOM = (
    "port {port} of the endpoint might be in use by an outgoing connection: the kernel assigns those any port "
    "(net.ipv4.ip_local_port_range={text}); if it is, set --rdzv-endpoint=HOST:PORT"
)


def _most_tasks(environ: Mapping[str, str]) -> int:
    """Maximum number of tasks on a node of the step; `2(x3),1` is two on each of three nodes and one on the last."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    counts = [match and int(match[1]) for match in map(_TASKS.fullmatch, text[: 1 << 16].split(","))]
    return max(count or 1 for count in counts)


def _gpus(environ: Mapping[str, str]) -> int | None:
    return number(environ, "SLURM_GPUS_ON_NODE", 0, MAX_GPUS)


def _cpus(environ: Mapping[str, str]) -> int | None:
    """Processors of this node's one task; `SLURM_CPUS_ON_NODE` counts the step's, or otherwise the job's."""
    return number(environ, "SLURM_CPUS_PER_TASK", 1, MAX_CPUS) or number(environ, "SLURM_CPUS_ON_NODE", 1, MAX_CPUS)
