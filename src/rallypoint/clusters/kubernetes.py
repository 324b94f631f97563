"""Kubernetes: the pods of an Indexed Job, and so those of JobSet and of Kubeflow's TrainJob.

Such a pod has its index in `JOB_COMPLETION_INDEX` and the host name `<job>-<index>`. The number of pods is told to none
of them: the pod's template has to give it, as `JOB_COMPLETIONS` or as `PET_NNODES`. Where the template names a headless
service (`subdomain`), the kubelet writes the pod's full name, `<job>-<index>.<service>.<namespace>.svc.<domain>`, into
its /etc/hosts, and DNS has that of pod 0 as soon as the pod has an address.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rallypoint.clusters.findings import (
    MAX_CPUS,
    MAX_NODES,
    Cluster,
    Finding,
    Machine,
    Nothing,
    Refusal,
    is_host_name,
    number,
)

PORT = 29400
"""Where pod 0 listens; it has a network of its own."""
SERVICE = "RALLYPOINT_SERVICE"
"""The variable that names the headless service, if /etc/hosts does not."""

_QUOTA = re.compile(r"([0-9]{1,15}) ([0-9]{1,15})\s*", re.ASCII)


def find(environ: Mapping[str, str], machine: Machine) -> Finding:
    index = number(environ, "JOB_COMPLETION_INDEX", 0, MAX_NODES - 1)
    if index is None:
        return Nothing(
            "JOB_COMPLETION_INDEX is not set: this is not a pod of a Job with completionMode: Indexed",
            "give --nnodes, --node-rank and --rdzv-endpoint, or PET_NNODES and its siblings in the pod's template",
        )
    nodes = number(environ, "JOB_COMPLETIONS", 1, MAX_NODES)
    if nodes is not None and index >= nodes:
        return Refusal(f"JOB_COMPLETION_INDEX={index} is not below JOB_COMPLETIONS={nodes}; set it to the completions")
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
        cpus=_cpus_of(machine.cpu_quota),
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


def _cpus_of(quota: str) -> int | None:
    """Processors that a control group's `cpu.max` allows, rounded up; None for any number."""
    match = _QUOTA.fullmatch(quota)
    if match is None or int(match[2]) == 0:
        return None
    return min(max(1, -(-int(match[1]) // int(match[2]))), MAX_CPUS)
