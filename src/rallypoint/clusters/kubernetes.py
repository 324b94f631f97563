"""Kubernetes: the pods of an Indexed Job (`--cluster=k8s`), and therefore of JobSet and Kubeflow's TrainJob; and the
pods of a Volcano Job (`--cluster=volcano`). Pure.

A pod of an Indexed Job has its index in `JOB_COMPLETION_INDEX`, and the host name `<job>-<index>`. No pod knows how
many there are: the pod template must set `JOB_COMPLETIONS` or `PET_NNODES`. If the template names a headless service
(`subdomain`), the kubelet writes the pod's full name, `<job>-<index>.<service>.<namespace>.svc.<domain>`, to its
/etc/hosts. DNS knows pod 0's name as soon as the pod has an address.

A pod of a Volcano Job with the plug-in `pytorch` has MASTER_ADDR, MASTER_PORT, WORLD_SIZE (the number of pods) and RANK
(the pod's): https://github.com/volcano-sh/volcano/blob/master/docs/user-guide/how_to_use_pytorch_plugin.md. With `svc`
and `env` it has `VC_<TASK>_HOSTS`, `VC_<TASK>_NUM` and its index in its task, VC_TASK_INDEX (how_to_use_svc_plugin.md
and how_to_use_env_plugin.md there). They suffice if the job has one task.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rallypoint.clusters.findings import (
    MAX_CPUS,
    Cluster,
    DetectionRefusal,
    Finding,
    Machine,
    NoCluster,
    is_host_name,
    number,
    usable,
)
from rallypoint.control.protocol.ranges import MAX_NODES

PORT = 29400
"""The port of pod 0, which has its own network."""
SERVICE = "RALLYPOINT_SERVICE"
"""Names the headless service, if /etc/hosts does not."""

_QUOTA = re.compile(r"([0-9]{1,15}) ([0-9]{1,15})\s*", re.ASCII)


def of_kubernetes(environ: Mapping[str, str], machine: Machine) -> Finding:
    index = number(environ, "JOB_COMPLETION_INDEX", 0, MAX_NODES - 1)
    if index is None:
        return NoCluster(
            "JOB_COMPLETION_INDEX is not set: this is not a pod of a Job with completionMode: Indexed",
            "set --nnodes, --node-rank and --rdzv-endpoint, or PET_NNODES, PET_NODE_RANK and PET_RDZV_ENDPOINT in the "
            "pod's template",
        )
    nodes = number(environ, "JOB_COMPLETIONS", 1, MAX_NODES)
    if nodes is not None and index >= nodes:
        return DetectionRefusal(
            f"JOB_COMPLETION_INDEX={index} is not below JOB_COMPLETIONS={nodes}; set JOB_COMPLETIONS to the Job's "
            "completions"
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
            "nnodes": "the number of pods of this Indexed Job is unknown; set JOB_COMPLETIONS in the pod's template to "
            "the Job's completions, or set --nnodes",
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
    """The rest of this pod's name in /etc/hosts: service, namespace, domain. Empty if missing."""
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
            f"the host name {hostname[:70]!r} is not <job>-{index}, so the name of pod 0 is unknown; set "
            "--rdzv-endpoint=HOST:29400 with the name of pod 0"
        )
    if not service:
        return (
            f"pod 0 of {job} has no name that other pods can look up; set subdomain in the pod's template to the name "
            f"of a headless Service that selects the pods, or {SERVICE} to that name"
        )
    return f"{job}-0.{service[:300]!r} is not a valid host name; set {SERVICE} to the name of the headless Service"


def _quota_cpus(quota: str) -> int | None:
    """Processors that a control group's `cpu.max` allows, rounded up; None without a limit."""
    match = _QUOTA.fullmatch(quota)
    if match is None or int(match[2]) == 0:
        return None
    return min(max(1, -(-int(match[1]) // int(match[2]))), MAX_CPUS)


# Volcano

_TASK_HOSTS = re.compile(r"VC_[A-Z0-9_]{1,253}_HOSTS", re.ASCII)
_PLUGINS = "set `plugins: {pytorch: [], svc: [], env: []}` in the Job"


def is_of_volcano(environ: Mapping[str, str]) -> bool:
    """Whether a Volcano plug-in has described the job to this pod."""
    return "VC_TASK_INDEX" in environ or any(map(_TASK_HOSTS.fullmatch, environ))


def of_volcano(environ: Mapping[str, str], machine: Machine) -> Finding:
    tasks = {name: _words(environ[name]) for name in sorted(filter(_TASK_HOSTS.fullmatch, environ))}
    index = number(environ, "RANK", 0, MAX_NODES - 1)
    by_plugin = index is not None and "MASTER_ADDR" in environ
    if by_plugin:
        nodes = number(environ, "WORLD_SIZE", 1, MAX_NODES)
        host = environ["MASTER_ADDR"].strip()
        port = number(environ, "MASTER_PORT", 1, 65535) or PORT
        origins = {"nnodes": "WORLD_SIZE", "node_rank": "RANK", "rdzv_endpoint": "--rdzv-endpoint (from MASTER_ADDR)"}
    else:
        index = number(environ, "VC_TASK_INDEX", 0, MAX_NODES - 1)
        if index is None or not tasks:
            return NoCluster("VC_TASK_INDEX and VC_..._HOSTS are not set: this is not a pod of a Volcano Job", _PLUGINS)
        if len(tasks) > 1:
            return DetectionRefusal(
                f"this Volcano Job has {len(tasks)} tasks ({', '.join(tasks)[:200]}), and the pod's number among all "
                f"pods is unknown; {_PLUGINS}, or set --nnodes, --node-rank and --rdzv-endpoint"
            )
        ((name, hosts),) = tasks.items()
        nodes, host, port = len(hosts) or None, hosts[0] if hosts else "", PORT
        origins = {"nnodes": name, "node_rank": "VC_TASK_INDEX", "rdzv_endpoint": f"--rdzv-endpoint (from {name})"}
    if index is None or nodes is None or index >= nodes or not is_host_name(host):
        return DetectionRefusal(
            f"the variables of this Volcano Job are inconsistent or incomplete: pod {index} of {nodes or 'unknown'}, "
            f"the first at {host[:120]!r}; set --nnodes, --node-rank and --rdzv-endpoint"
        )
    job = host.partition(".")[2].split(".")[0]
    return Cluster(
        title=f"Volcano Job {job or '(unknown)'}",
        nodes=nodes,
        index=index,
        host=host,
        port=port,
        job_id=f"volcano-{job}" if job else "",
        hosts_here=index == 0,
        cpus=_quota_cpus(machine.cpu_quota),
        origins={**origins, "rdzv_id": "the name of the first pod"},
    )


def _words(text: str) -> list[str]:
    """The pods of a task; empty if one of them is invalid."""
    return usable(filter(None, text.strip().split(",")))
