"""Batch systems other than Slurm: PBS (`--cluster=pbs`), LSF (`lsf`) and Flux (`flux`). Pure.

Laws:

1. Only a process that was started once on each host counts as a node. A script or a shell runs only on the first host,
   but its environment lists all hosts.
2. If a host is listed several times, the batch system may have started several processes on it.
3. Node 0 is the first host in the list.

PBS Professional and OpenPBS. `PBS_NODEFILE` names a file that exists only on the first host, with a line per process
that `pbsdsh` starts. `PBS_NODENUM` counts hosts from 0, in the order of that file. `PBS_TASKNUM` counts the host's
tasks in hex, and is 1 for the script (`start_process` and `job_nodes` in src/resmom/start_exec.c). A `pbsdsh` task gets
no `PBS_NODEFILE`. https://github.com/openpbs/openpbs: doc/man1/pbsdsh.1B, doc/man1/qsub.1B. TORQUE uses the same names
(https://linux.die.net/man/1/pbsdsh) and `PBS_NUM_NODES`.

LSF. `LSB_MCPU_HOSTS` is "host slots host slots ..."; `LSB_HOSTS` lists a host once per slot.
https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=variables-environment-set-job-execution. `blaunch` starts a task
per slot, or per listed host (https://www.ibm.com/docs/en/SSWRJV_10.1.0/lsf_command_ref/blaunch.8.html), and numbers the
tasks from 1 in `LSF_PM_TASKID` (src/mca/ess/lsf of https://github.com/openpmix/prrte reads it so).

Flux. `FLUX_JOB_NNODES`, `FLUX_JOB_SIZE`, `FLUX_TASK_RANK`; no variable lists the hosts. In a batch script or a shell of
`flux alloc`, only `FLUX_URI` is set.
https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man7/flux-environment.html
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from itertools import islice

from rallypoint.base.errors import UsageError
from rallypoint.clusters.findings import (
    MAX_CPUS,
    MAX_ID,
    Cluster,
    DetectionRefusal,
    Finding,
    Machine,
    NoCluster,
    number,
    place_of,
    usable,
)
from rallypoint.clusters.ports import control_port
from rallypoint.control.protocol.ranges import MAX_NODES

MAX_SLOTS = MAX_NODES * 1024
"""Maximum number of lines of a file, or words of a variable, to read: a host may be listed once per processor."""


def _in_script(title: str, hosts: int | None, start: str, unknown: str, cpus: int | None = None) -> Finding:
    """Report a process that was started once in its job (law 1), by a script or in a shell."""
    if hosts is None:
        return NoCluster(f"{title} did not start this process once per host ({unknown})", f"use {start}")
    if hosts > 1:
        return DetectionRefusal(
            f"{title} has {hosts} hosts, but this process is its script or a shell on one of them; use {start} to run "
            "on all hosts, or --standalone to run on this one"
        )
    return Cluster(title=title, nodes=1, index=0, cpus=cpus)


# PBS

_PBS_JOB = re.compile(r"([0-9]{1,10})(?:\[([0-9]{0,10})\])?(?:\.[\w.-]{1,255})?", re.ASCII)
_HEX = re.compile(r"[0-9A-Fa-f]{1,8}", re.ASCII)
_PBS_START = "mpiexec -ppn 1 rallyrun ..., or pbsdsh -- rallyrun ... where PBS_NODEFILE is a file that all hosts see,"


def pbs_hosts(machine: Machine) -> list[str]:
    """The hosts in the job's node file, without duplicates; empty if it cannot be read here or does not exist."""
    return usable(_pbs_lines(machine))


def _pbs_lines(machine: Machine) -> list[str]:
    lines = (line.strip() for line in machine.job_file.splitlines())
    return list(islice(filter(None, lines), MAX_SLOTS))


def of_pbs(environ: Mapping[str, str], machine: Machine) -> Finding:
    text = environ.get("PBS_JOBID", "").strip()
    if not text:
        return NoCluster("PBS did not start this process: PBS_JOBID is not set", f"use {_PBS_START} in a PBS job")
    match = _PBS_JOB.fullmatch(text)
    if match is None:
        raise UsageError(f"PBS_JOBID={text[:60]!r} is not a PBS job id; unset it, or remove --cluster")
    job, part = match[1], match[2] or ""
    title = f"PBS job {job}[{part}]" if part else f"PBS job {job}"
    lines = _pbs_lines(machine)
    hosts = usable(lines)
    if lines and not hosts:
        return DetectionRefusal(
            f"the file that PBS_NODEFILE names is not a valid list of hosts (its first line is {lines[0][:60]!r}); set "
            "--nnodes, --node-rank and --rdzv-endpoint"
        )
    count = len(hosts) or number(environ, "PBS_NUM_NODES", 1, MAX_NODES)
    index = number(environ, "PBS_NODENUM", 0, MAX_NODES - 1)
    cpus = number(environ, "NCPUS", 1, MAX_CPUS)
    if index is None or (index == 0 and _pbs_task(environ) <= 1):
        return _in_script(title, count, _PBS_START, "PBS_NODEFILE cannot be read here", cpus)
    if len(lines) > len(hosts):
        name = next(host for host in hosts if lines.count(host) > 1)
        return DetectionRefusal(
            f"{title} lists {name} {lines.count(name)} times in PBS_NODEFILE and starts one task per entry, but "
            "rallyrun starts the workers of a host itself; request mpiprocs=1 per chunk, and set --nproc-per-node to "
            "the number of workers"
        )
    if count is not None and index >= count:
        return DetectionRefusal(
            f"the variables of {title} are inconsistent: PBS_NODENUM={index} of {count} hosts; set --nnodes, "
            "--node-rank and --rdzv-endpoint"
        )
    return Cluster(
        title=title,
        nodes=count,
        index=index,
        host=hosts[0] if hosts else "",
        port=control_port(int(job), int(part or 0), ephemeral=machine.ephemeral)[0],
        job_id=f"pbs-{job}.{part}" if part else f"pbs-{job}",
        hosts_here=index == 0,
        cpus=cpus,
        wanted={
            "nnodes": f"the number of hosts of {title} is unknown here; {_COPY}, or set --nnodes",
            "rdzv_endpoint": f"the first host of {title} is unknown here; {_COPY}, or set --rdzv-endpoint=HOST:29400",
        },
        origins={
            "nnodes": "PBS_NODEFILE" if hosts else "PBS_NUM_NODES",
            "node_rank": "PBS_NODENUM",
            "rdzv_endpoint": "--rdzv-endpoint (from PBS_NODEFILE)",
            "rdzv_id": "PBS_JOBID",
        },
    )


_COPY = "set PBS_NODEFILE to a copy of the script's file on a disk that all hosts share"


def _pbs_task(environ: Mapping[str, str]) -> int:
    """The number of this task on its host; 1 for the script, 0 if unknown."""
    text = environ.get("PBS_TASKNUM", "").strip()
    return int(text, 16) if _HEX.fullmatch(text) else 0


# LSF

_LSF_START = "blaunch rallyrun ... in a job of bsub -n HOSTS -R 'span[ptile=1]'"


def lsf_hosts(environ: Mapping[str, str]) -> list[str]:
    """The job's hosts in order, without duplicates; empty if unknown."""
    return usable(name for name, _ in _lsf_slots(environ))


def _lsf_slots(environ: Mapping[str, str]) -> list[tuple[str, int]]:
    """The job's hosts with their numbers of slots."""
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    if words and len(words) % 2 == 0 and all(word.isascii() and word.isdigit() for word in words[1::2]):
        return [(name, int(slots[:9])) for name, slots in zip(words[::2], words[1::2], strict=True)]
    names = environ.get("LSB_HOSTS", "").split()[:MAX_SLOTS]
    slots: dict[str, int] = {}
    for name in names:
        slots[name] = slots.get(name, 0) + 1
    return list(slots.items())


def of_lsf(environ: Mapping[str, str], machine: Machine) -> Finding:
    job = number(environ, "LSB_JOBID", 1, MAX_ID)
    if job is None:
        return NoCluster("LSF did not start this process: LSB_JOBID is not set", f"use {_LSF_START}")
    part = number(environ, "LSB_JOBINDEX", 0, MAX_ID) or 0
    title = f"LSF job {job}[{part}]" if part else f"LSF job {job}"
    slots = _lsf_slots(environ)
    hosts = usable(name for name, _ in slots)
    if slots and not hosts:
        return DetectionRefusal(
            f"{title} does not list its hosts in LSB_MCPU_HOSTS={environ.get('LSB_MCPU_HOSTS', '')[:120]!r}; set "
            "--nnodes, --node-rank and --rdzv-endpoint"
        )
    task = number(environ, "LSF_PM_TASKID", 1, MAX_SLOTS)
    if task is None:
        unknown = "LSF_PM_TASKID and LSB_MCPU_HOSTS are not set"
        return _in_script(title, len(hosts) or None, _LSF_START, unknown)
    if not hosts:
        return DetectionRefusal(
            f"the hosts of {title} are unknown: LSB_MCPU_HOSTS and LSB_HOSTS are not set; pass on LSF's variables "
            "(a container or `env -i` can drop them), or set --nnodes, --node-rank and --rdzv-endpoint"
        )
    index = _lsf_index(task, hosts, machine.hostname, several=any(count > 1 for _, count in slots))
    if index is None:
        return DetectionRefusal(
            f"{title} has {len(hosts)} hosts, and this is task {task} of blaunch, on {machine.hostname[:70]!r}: "
            "blaunch started several tasks per host, but rallyrun starts the workers of a host itself; submit with "
            f"bsub -n {len(hosts)} -R 'span[ptile=1]', and set --nproc-per-node to the number of workers"
        )
    return Cluster(
        title=title,
        nodes=len(hosts),
        index=index,
        host=hosts[0],
        port=control_port(job, part, ephemeral=machine.ephemeral)[0],
        job_id=f"lsf-{job}.{part}",
        hosts_here=index == 0,
        origins={
            "nnodes": "LSB_MCPU_HOSTS",
            "node_rank": "LSF_PM_TASKID",
            "rdzv_endpoint": "--rdzv-endpoint (from LSB_MCPU_HOSTS)",
            "rdzv_id": "LSB_JOBID",
        },
    )


def _lsf_index(task: int, hosts: Sequence[str], hostname: str, *, several: bool) -> int | None:
    """This task's node number; None if the tasks are, as far as this one can tell, not one per host.

    If hosts have several slots, the task must be on the host with its number: with two slots per host, task 2 is on the
    first host. Task 1 cannot tell; the others end, and blaunch with them.
    """
    place = place_of(hostname, hosts)
    if task > len(hosts) or (several and place != task - 1):
        return None
    return task - 1 if place is None else place


# Flux

_FLUX_START = "flux run -N NODES --tasks-per-node=1 rallyrun ..."
_FLUX_JOB = re.compile("[f\u0192]([1-9A-HJ-NP-Za-km-z]{1,16})")
"""An id in the format F58: a letter, and base-58 digits."""


def of_flux(environ: Mapping[str, str], machine: Machine) -> Finding:
    rank = number(environ, "FLUX_TASK_RANK", 0, MAX_SLOTS)
    if rank is None:
        is_inside = bool(environ.get("FLUX_URI"))
        where = "this process is in a Flux instance, but" if is_inside else "FLUX_URI is not set, and"
        return NoCluster(f"{where} flux run did not start it (FLUX_TASK_RANK is not set)", f"use {_FLUX_START}")
    nodes = number(environ, "FLUX_JOB_NNODES", 1, MAX_NODES)
    size = number(environ, "FLUX_JOB_SIZE", 1, MAX_SLOTS)
    match = _FLUX_JOB.fullmatch(environ.get("FLUX_JOB_ID", ""))
    name = match[1] if match else ""
    title = f"Flux job f{name}" if name else "the Flux job"
    if nodes is None or size is None:
        return DetectionRefusal(
            f"the number of tasks of {title} is unknown: FLUX_JOB_NNODES and FLUX_JOB_SIZE must be set; pass on "
            "Flux's variables, or set --nnodes, --node-rank and --rdzv-endpoint"
        )
    if size > nodes:
        return DetectionRefusal(
            f"{title} has {size} tasks on {nodes} node{'' if nodes == 1 else 's'}, but rallyrun starts the workers of "
            f"a node itself; use flux run -N {nodes} --tasks-per-node=1, and set --nproc-per-node to the number of "
            "workers"
        )
    if size < nodes or rank >= size:
        return DetectionRefusal(
            f"the variables of {title} are inconsistent: FLUX_JOB_NNODES={nodes}, FLUX_JOB_SIZE={size}, "
            f"FLUX_TASK_RANK={rank}; set --nnodes, --node-rank and --rdzv-endpoint"
        )
    return Cluster(
        title=title,
        nodes=nodes,
        index=rank,
        host=machine.hostname if nodes == 1 else "",
        port=control_port(zlib.crc32(name.encode()), ephemeral=machine.ephemeral)[0],
        job_id=f"flux-f{name}" if name else "",
        hosts_here=nodes == 1,
        wanted={
            "rdzv_endpoint": f"the host of task 0 of {title} is unknown; set it with a free port: rallyrun "
            "--cluster=flux --rdzv-backend=c10d --rdzv-endpoint=$(flux hostlist -l -n 0):29400 ..."
        },
        origins={
            "nnodes": "FLUX_JOB_NNODES",
            "node_rank": "FLUX_TASK_RANK",
            "rdzv_endpoint": "--rdzv-endpoint (from Flux)",
            "rdzv_id": "FLUX_JOB_ID",
        },
    )
