"""Which cluster has started this process (`--cluster`), what its environment says of the job, and whether it has
started others too. Pure.

All of the environment is foreign text: numbers are checked for their range, names for their letters and length.

Kubernetes: the pods of an Indexed Job, and so those of JobSet and of Kubeflow's TrainJob. Such a pod has its index in
`JOB_COMPLETION_INDEX` and the host name `<job>-<index>`. The number of pods is told to none of them: the pod's template
has to give it, as `JOB_COMPLETIONS` or as `PET_NNODES`. Where the template names a headless service (`subdomain`), the
kubelet writes the pod's full name, `<job>-<index>.<service>.<namespace>.svc.<domain>`, into its /etc/hosts, and DNS has
that of pod 0 as soon as the pod has an address.

MPI launchers: `mpirun` of Open MPI, and Hydra's, which MPICH, Intel MPI and others have. Each rank is told how many
there are, and how many on its host, but no rank is told where the others are: the user gives the endpoint, unless there
is only one.

Slurm: the step that `srun` has started, of which this process is the only task on its node. Laws:

1. Only the variables of the step are believed for nodes and hosts: those of the job name all nodes of the allocation.
2. Node 0 of the step is the first host of its list, whatever the order of the tasks (`--distribution=arbitrary`).
3. The id has the job, the step and how often the job was requeued: what an earlier run has left is another job's.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rallypoint.base.errors import UsageError
from rallypoint.clusters.hostlist import HostlistError, expand
from rallypoint.control.protocol.ranges import MAX_NODES

MAX_CPUS = 1 << 16
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,10}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts about a node besides the environment.

    `hostname` is that of the kernel; `hosts_file` the text of /etc/hosts; `ephemeral` that of the kernel's range of
    ports for outgoing connections; `cpu_quota` that of the control group's `cpu.max`. Each is empty if unknown.
    """

    hostname: str = ""
    hosts_file: str = ""
    ephemeral: str = ""
    cpu_quota: str = ""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A job that a cluster has started on all its nodes, and this node's place in it.

    `title` names the job for people. `nodes` is None if only the user can know it. `index` is this node's, from 0.
    `host` and `port` are where node 0 can be reached; `host` is empty if the environment does not say.
    `hosts_here`: this node is known to be node 0, whatever its name
    stands for. `gpus` and `cpus` are how many of them the task on this node may use, None if the environment does not
    say. `wanted` has, for the name of a value that is not known, the sentence that asks for it; `origins`, for the name
    of a value, where it comes from. `remark` is for the user, if it is not empty, and so is `unbind`, where the task
    may run on few of the processors.
    """

    title: str
    nodes: int | None
    index: int
    host: str = ""
    port: int = 0
    job_id: str = ""
    hosts_here: bool = False
    gpus: int | None = None
    cpus: int | None = None
    wanted: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""
    unbind: str = ""


@dataclass(frozen=True)
class DetectionRefusal:
    """The job cannot be told from what is there; the sentence says why, and what to type."""

    sentence: str


@dataclass(frozen=True)
class NoCluster:
    """No cluster has started this process: `fact` says how that is known, `remedy` what to do if one should have."""

    fact: str
    remedy: str

    @property
    def sentence(self) -> str:
        return f"{self.fact}; {self.remedy}"


Finding = Cluster | DetectionRefusal | NoCluster


def number(environ: Mapping[str, str], name: str, least: int, most: int) -> int | None:
    """A number of the environment; None if not set or empty. Raises UsageError: it is none, or out of range."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not _NUMBER.fullmatch(text) or not least <= int(text) <= most:
        raise UsageError(
            f"{name}={text[:60]!r} is not a number from {least} to {most}, as its cluster would give it; unset it, or "
            "leave --cluster out"
        )
    return int(text)


def is_host_name(text: str) -> bool:
    """Whether a text can be the name or the IPv4 address of a host."""
    return _HOST.fullmatch(text) is not None and all(0 < len(label) < 64 for label in text.split("."))


DEFAULT_RANGE = "32768 60999"
"""What `/proc/sys/net/ipv4/ip_local_port_range` says where nobody has changed it."""

_SPANS = ((10000, 32767), (61000, 65535), (5000, 9999))
"""From where ports are taken: the first of these of which the kernel's range leaves `_ENOUGH`."""
_ENOUGH = 1000
_USED_BY_OTHERS = frozenset(
    {5000, 5432, 5671, 5672, 5900, 5985, 6379, 6443, *range(6000, 6064), *range(6817, 6821), 7077, 8000, 8080, 8081}
    | {8265, 8443, 8786, 8787, 8888, 9000, 9090, 9091, 9092, 9093, 9100, 9200, 9300, 9400, 9418}
    | {*range(10248, 10260), 11211, 15672, 16686, 18080, 20048, 25672, 26379, 27017, 29400, 29500}
)
"""Ports of well-known services that machines of a cluster run, and those that launchers take where none is given."""
_STEP_STRIDE, _RESTART_STRIDE = 101, 10007
"""Jobs that follow one another have ports that do, too; steps and restarts of a job are set apart from those."""


def control_port(job: int, step: int = 0, restart: int = 0, ephemeral: str = DEFAULT_RANGE) -> tuple[int, bool]:
    """The port of a job's control plane, and whether it is outside of the kernel's range of ports (`ephemeral`, its
    text).

    It follows from the numbers of the job and of the step in it, and from how often the job was begun again.
    """
    low, high = _range_of(ephemeral)
    for first, last in _SPANS:
        usable = [port for port in range(first, last + 1) if not low <= port <= high and port not in _USED_BY_OTHERS]
        if len(usable) >= _ENOUGH:
            return usable[_number(job, step, restart) % len(usable)], True
    usable = [port for port in range(_SPANS[0][0], _SPANS[0][1] + 1) if port not in _USED_BY_OTHERS]
    return usable[_number(job, step, restart) % len(usable)], False


def _number(job: int, step: int, restart: int) -> int:
    return job + _STEP_STRIDE * step + _RESTART_STRIDE * restart


def _range_of(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"\s*([0-9]{1,5})\s+([0-9]{1,5})\s*", text, re.ASCII)
    if match is None or not int(match[1]) <= int(match[2]) <= 65535:
        return _range_of(DEFAULT_RANGE)
    return int(match[1]), int(match[2])


PORT = 29400
"""Where pod 0 listens; it has a network of its own."""
SERVICE = "RALLYPOINT_SERVICE"
"""The variable that names the headless service, if /etc/hosts does not."""

_QUOTA = re.compile(r"([0-9]{1,15}) ([0-9]{1,15})\s*", re.ASCII)


def _of_kubernetes(environ: Mapping[str, str], machine: Machine) -> Finding:
    index = number(environ, "JOB_COMPLETION_INDEX", 0, MAX_NODES - 1)
    if index is None:
        return NoCluster(
            "JOB_COMPLETION_INDEX is not set: this is not a pod of a Job with completionMode: Indexed",
            "give --nnodes, --node-rank and --rdzv-endpoint, or PET_NNODES and its siblings in the pod's template",
        )
    nodes = number(environ, "JOB_COMPLETIONS", 1, MAX_NODES)
    if nodes is not None and index >= nodes:
        return DetectionRefusal(
            f"JOB_COMPLETION_INDEX={index} is not below JOB_COMPLETIONS={nodes}; set it to the completions"
        )
    name, dash, last = machine.hostname.split(".")[0].rpartition("-")
    job = name if dash and last == str(index) and is_host_name(name) else ""
    service = environ.get(SERVICE, "").strip() or _service_of(machine)
    host = f"{job}-0.{service}" if job and service else ""
    return Cluster(
        title=f"Kubernetes Job {job or '(unknown)'}",
        nodes=nodes,
        index=index,
        host=host if is_host_name(host) else "",
        port=PORT,
        job_id=f"k8s-{job}" if job else "",
        cpus=_quota_cpus(machine.cpu_quota),
        wanted={
            "nnodes": "the number of pods of this Indexed Job is not known; set JOB_COMPLETIONS in the pod's template "
            "to the Job's completions, or give --nnodes",
            "rdzv_endpoint": _why_no_host(machine.hostname, index, job, service),
        },
        origins={
            "nnodes": "JOB_COMPLETIONS",
            "node_rank": "JOB_COMPLETION_INDEX",
            "rdzv_endpoint": "--rdzv-endpoint (from the pod's name)",
            "rdzv_id": "the pod's name",
        },
    )


def _service_of(machine: Machine) -> str:
    """What follows this pod's name in /etc/hosts: the service, the namespace, the domain. Empty if it is not there."""
    prefix = machine.hostname.split(".")[0] + "."
    for line in machine.hosts_file[: 1 << 20].splitlines():
        names = line.partition("#")[0].split()[1:]
        for name in names:
            if name.startswith(prefix) and len(name) > len(prefix):
                return name.removeprefix(prefix)
    return ""


def _why_no_host(hostname: str, index: int, job: str, service: str) -> str:
    if not job:
        return (
            f"the host name {hostname[:70]!r} is not <job>-{index}, so that the name of pod 0 is not known; give "
            "--rdzv-endpoint=HOST:29400 with the name of pod 0"
        )
    if not service:
        return (
            f"pod 0 of {job} has no name that the others could look up; set subdomain in the pod's template to the "
            f"name of a headless Service that selects the pods, or {SERVICE} to that name"
        )
    return f"{job}-0.{service[:300]!r} is not a host name; set {SERVICE} to the name of the headless Service"


def _quota_cpus(quota: str) -> int | None:
    """Processors that a control group's `cpu.max` allows, rounded up; None for any number."""
    match = _QUOTA.fullmatch(quota)
    if match is None or int(match[2]) == 0:
        return None
    return min(max(1, -(-int(match[1]) // int(match[2]))), MAX_CPUS)


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
    for launcher in LAUNCHERS:
        if {launcher.size, launcher.rank, launcher.local_size} <= environ.keys():
            return launcher
    return None


def _of_mpi(environ: Mapping[str, str], machine: Machine) -> Finding:
    launcher = launcher_of(environ)
    if launcher is None:
        return NoCluster(
            "neither OMPI_COMM_WORLD_SIZE with OMPI_COMM_WORLD_LOCAL_SIZE, nor PMI_SIZE with MPI_LOCALNRANKS is set: "
            "no MPI launcher has started this process",
            f"write {LAUNCHERS[0].one_per_host} rallyrun ..., or {_HYDRA} rallyrun ...",
        )
    size = number(environ, launcher.size, 1, MAX_NODES)
    rank = number(environ, launcher.rank, 0, MAX_NODES - 1)
    here = number(environ, launcher.local_size, 1, MAX_NODES)
    if size is None or rank is None or here is None or rank >= size or here > size:
        return DetectionRefusal(
            f"{launcher.title} contradicts itself: {launcher.size}={size}, {launcher.rank}={rank}, "
            f"{launcher.local_size}={here}; give --nnodes, --node-rank and --rdzv-endpoint"
        )
    if here > 1:
        return DetectionRefusal(
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


_MOST = 0xFFFFFFFF
_SPECIAL_STEP = 0xFFFFFFF0
"""From here on, numbers of steps stand for the batch script, an interactive shell, and processes from elsewhere."""
_SRUN = "srun --ntasks-per-node=1 rallyrun ..."
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", re.ASCII)


def _of_slurm(environ: Mapping[str, str], machine: Machine) -> Finding:
    job = number(environ, "SLURM_JOB_ID", 1, _MOST) or number(environ, "SLURM_JOBID", 1, _MOST)
    if job is None:
        return NoCluster("SLURM_JOB_ID is not set: Slurm has not started this process", f"write {_SRUN}")
    step = number(environ, "SLURM_STEP_ID", 0, _MOST)
    if step is None:
        step = number(environ, "SLURM_STEPID", 0, _MOST)
    if step is None or step >= _SPECIAL_STEP or "SLURM_PROCID" not in environ:
        return _outside_a_step(environ, job)
    return _of_a_step(environ, machine, job, step)


def _outside_a_step(environ: Mapping[str, str], job: int) -> Finding:
    """In a batch script, or in a shell by `salloc` or ssh: no srun has started one agent on each node."""
    nodes = number(environ, "SLURM_JOB_NUM_NODES", 1, MAX_NODES) or number(environ, "SLURM_NNODES", 1, MAX_NODES)
    if nodes is None:
        return NoCluster(
            f"Slurm job {job} has not started this process with srun (SLURM_STEP_ID and SLURM_JOB_NUM_NODES are not "
            "set, as after ssh to a node of it)",
            f"for all nodes of the job write {_SRUN}",
        )
    if nodes > 1:
        return DetectionRefusal(
            f"Slurm job {job} has {nodes} nodes, and this process was started without srun, on one of them; write "
            f"{_SRUN} to use all of them, or --standalone for this one"
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
            f"{title} does not say which hosts it has: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} "
            "not set; pass the variables of Slurm on (a container or `env -i` may drop them), or give --nnodes, "
            "--node-rank and --rdzv-endpoint"
        )
    try:
        hosts = expand(names)
    except HostlistError as error:
        return DetectionRefusal(
            f"SLURM_STEP_NODELIST={names[:120]!r} is not a list of hosts: {error}; give --rdzv-endpoint"
        )
    if len(hosts) != nodes or index >= nodes or not is_host_name(hosts[0]):
        return DetectionRefusal(
            f"{title} contradicts itself: SLURM_STEP_NODELIST={names[:120]!r} names {len(hosts)} hosts, "
            f"SLURM_STEP_NUM_NODES={nodes}, SLURM_NODEID={index}; give --nnodes, --node-rank and --rdzv-endpoint"
        )
    if (most := _most_tasks(environ)) > 1:
        return DetectionRefusal(
            f"{title} has {most} tasks on a node (SLURM_STEP_TASKS_PER_NODE="
            f"{environ['SLURM_STEP_TASKS_PER_NODE'][:60]}), and rallyrun starts the workers of a node itself; write "
            f"srun --ntasks-per-node=1 and the number of workers as --nproc-per-node"
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
        unbind="give srun --cpus-per-task=N, or --cpu-bind=none",
        remark="" if is_outside else _NO_ROOM.format(port=port, text=machine.ephemeral.strip()[:40]),
    )


_NO_ROOM = (
    "port {port} of the endpoint may be taken by an outgoing connection: the kernel gives those any port "
    "(net.ipv4.ip_local_port_range={text}); if it is, give --rdzv-endpoint=HOST:PORT"
)


def _most_tasks(environ: Mapping[str, str]) -> int:
    """The most tasks that a node of the step has; `2(x3),1` is two on each of three nodes and one on the last."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    counts = [match and int(match[1]) for match in map(_TASKS.fullmatch, text[: 1 << 16].split(","))]
    return max(count or 1 for count in counts)


def _gpus(environ: Mapping[str, str]) -> int | None:
    return number(environ, "SLURM_GPUS_ON_NODE", 0, 1024)


def _cpus(environ: Mapping[str, str]) -> int | None:
    """Processors of the one task on this node; `SLURM_CPUS_ON_NODE` are those of the step, or else of the job."""
    return number(environ, "SLURM_CPUS_PER_TASK", 1, MAX_CPUS) or number(environ, "SLURM_CPUS_ON_NODE", 1, MAX_CPUS)


_FINDERS = {"slurm": _of_slurm, "mpi": _of_mpi, "k8s": _of_kubernetes}


def find(which: str, environ: Mapping[str, str], machine: Machine) -> Finding:
    """Read the environment; `which` is slurm, mpi, k8s, or auto to detect it. Raises UsageError: a variable has a value
    that its cluster does not give.
    """
    if which != "auto":
        return _FINDERS[which](environ, machine)
    # An MPI launcher first: inside a job of Slurm it starts its ranks by a step of its own, which is not theirs.
    if launcher_of(environ) is not None:
        return _of_mpi(environ, machine)
    if "SLURM_JOB_ID" in environ or "SLURM_JOBID" in environ:
        return _of_slurm(environ, machine)
    if "JOB_COMPLETION_INDEX" in environ:
        return _of_kubernetes(environ, machine)
    return NoCluster(
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

    launcher = launcher_of(environ)
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
