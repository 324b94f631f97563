"""Platforms that start a task on each node of a job and describe the job in variables: SkyPilot
(`--cluster=skypilot`), dstack (`dstack`), Amazon SageMaker (`sagemaker`) and Azure Machine Learning (`azureml`). Pure.

Each platform starts one process per node, so the process's number is the node's. Nodes of SkyPilot and dstack may be
machines that others use too, so their port is derived from the job. Each SageMaker container has its own network.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from rallypoint.clusters.findings import (
    MAX_CPUS,
    MAX_GPUS,
    Cluster,
    DetectionRefusal,
    Finding,
    Machine,
    NoCluster,
    is_host,
    name_of_job,
    number,
    usable,
)
from rallypoint.clusters.ports import control_port
from rallypoint.control.protocol.ranges import MAX_NODES

_GIVE = "set --nnodes, --node-rank and --rdzv-endpoint"


class Listing(NamedTuple):
    """A platform that lists all nodes' addresses in the order of their numbers: the names of its variables, and where
    they are documented."""

    title: str
    addresses: str
    rank: str
    nodes: str
    gpus: str
    job: tuple[str, ...]
    prefix: str
    source: str


SKYPILOT = Listing(
    "SkyPilot task",
    addresses="SKYPILOT_NODE_IPS",
    rank="SKYPILOT_NODE_RANK",
    nodes="SKYPILOT_NUM_NODES",
    gpus="SKYPILOT_NUM_GPUS_PER_NODE",
    job=("SKYPILOT_TASK_ID",),
    prefix="sky",
    source="https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html",
)
DSTACK = Listing(
    "dstack run",
    addresses="DSTACK_NODES_IPS",
    rank="DSTACK_NODE_RANK",
    nodes="DSTACK_NODES_NUM",
    gpus="DSTACK_GPUS_PER_NODE",
    job=("DSTACK_RUN_ID", "DSTACK_RUN_NAME"),
    prefix="dstack",
    source="https://dstack.ai/docs/concepts/tasks/#system-environment-variables",
)


def of_skypilot(environ: Mapping[str, str], machine: Machine) -> Finding:
    return _of_listing(SKYPILOT, environ, machine)


def of_dstack(environ: Mapping[str, str], machine: Machine) -> Finding:
    return _of_listing(DSTACK, environ, machine)


def _of_listing(names: Listing, environ: Mapping[str, str], machine: Machine) -> Finding:
    index = number(environ, names.rank, 0, MAX_NODES - 1)
    if index is None:
        return NoCluster(f"{names.rank} is not set: this is not a task of {names.title.split()[0]}", _GIVE)
    job = name_of_job(environ, *names.job)
    title = f"{names.title} {job}" if job else f"the {names.title}"
    # The list may be empty if the platform does not know its only node's address.
    addresses = environ.get(names.addresses, "").split()
    hosts = usable(addresses)
    count = number(environ, names.nodes, 1, MAX_NODES) or len(hosts) or None
    if count is None or (hosts and len(addresses) != count) or index >= count or (addresses and not hosts):
        return DetectionRefusal(
            f"the variables of {title} are inconsistent: {names.addresses} lists {len(addresses)} hosts, "
            f"{names.nodes}={count}, {names.rank}={index}; {_GIVE}"
        )
    return Cluster(
        title=title,
        nodes=count,
        index=index,
        host=hosts[0] if hosts else "",
        port=control_port(zlib.crc32(job.encode()), ephemeral=machine.ephemeral)[0],
        job_id=f"{names.prefix}-{job}" if job else "",
        hosts_here=index == 0,
        gpus=number(environ, names.gpus, 0, MAX_GPUS),
        wanted={
            "rdzv_endpoint": f"the address of node 0 of {title} is unknown: {names.addresses} is not set; set "
            "--rdzv-endpoint=HOST:29400"
        },
        origins={
            "nnodes": names.nodes,
            "node_rank": names.rank,
            "rdzv_endpoint": f"--rdzv-endpoint (from {names.addresses})",
            "rdzv_id": names.job[0],
        },
    )


# SageMaker: https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md, and for containers
# without that toolkit https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html

SAGEMAKER_FILE = "/opt/ml/input/config/resourceconfig.json"
"""The file with the job's hosts. The toolkit's variable `SM_RESOURCE_CONFIG` contains the same text."""
_SAGEMAKER_PORT = 29400


def of_sagemaker(environ: Mapping[str, str], machine: Machine) -> Finding:
    here, named = environ.get("SM_CURRENT_HOST", ""), _strings(environ.get("SM_HOSTS", ""))
    if not named:
        config = _object(environ.get("SM_RESOURCE_CONFIG", "") or machine.job_file)
        here, named = str(config.get("current_host", "")), _list_of_strings(config.get("hosts"))
    if not named:
        return NoCluster(
            f"this is not a SageMaker training job: SM_HOSTS is not set, and {SAGEMAKER_FILE} cannot be read", _GIVE
        )
    hosts = usable(sorted(named))
    if not hosts or len(hosts) != len(named) or here not in hosts:
        return DetectionRefusal(
            f"SageMaker's list of hosts is inconsistent: it has {len(named)} entries, and this host is {here[:60]!r}; "
            f"{_GIVE}"
        )
    job = name_of_job(environ, "TRAINING_JOB_NAME")
    return Cluster(
        title=f"SageMaker job {job}" if job else "the SageMaker job",
        nodes=len(hosts),
        index=hosts.index(here),
        host=hosts[0],
        port=_SAGEMAKER_PORT,
        job_id=f"sagemaker-{job}" if job else "",
        hosts_here=here == hosts[0],
        gpus=number(environ, "SM_NUM_GPUS", 0, MAX_GPUS),
        cpus=number(environ, "SM_NUM_CPUS", 1, MAX_CPUS),
        origins={
            "nnodes": "SM_HOSTS",
            "node_rank": "SM_CURRENT_HOST",
            "rdzv_endpoint": "--rdzv-endpoint (from SM_HOSTS)",
            "rdzv_id": "TRAINING_JOB_NAME",
        },
    )


def _decoded(text: str) -> object:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value


def _object(text: str) -> dict[str, object]:
    value = _decoded(text)
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else {}


def _strings(text: str) -> list[str]:
    return _list_of_strings(_decoded(text))


def _list_of_strings(value: object) -> list[str]:
    """The list if it contains only texts; otherwise empty."""
    if not isinstance(value, list) or len(value) > MAX_NODES:
        return []
    return [item for item in value if isinstance(item, str)] if all(isinstance(item, str) for item in value) else []


# Azure Machine Learning, `distribution: type: pytorch` with one process per instance:
# https://learn.microsoft.com/en-us/azure/machine-learning/how-to-train-distributed-gpu


def of_azureml(environ: Mapping[str, str], _machine: Machine) -> Finding:
    index = number(environ, "NODE_RANK", 0, MAX_NODES - 1)
    host = environ.get("MASTER_ADDR", "").strip()
    if index is None or not host:
        return NoCluster(
            "Azure Machine Learning did not start a distributed job of type pytorch: NODE_RANK and MASTER_ADDR are not "
            "set",
            f"set `distribution: {{type: pytorch, process_count_per_instance: 1}}` in the job, or {_GIVE}",
        )
    nodes = number(environ, "AZUREML_NODE_COUNT", 1, MAX_NODES)
    world = number(environ, "WORLD_SIZE", 1, MAX_NODES * 1024)
    local = number(environ, "LOCAL_RANK", 0, MAX_NODES)
    if local or (nodes is not None and world is not None and world > nodes):
        return DetectionRefusal(
            f"Azure Machine Learning started several processes on this instance (WORLD_SIZE={world}, "
            f"AZUREML_NODE_COUNT={nodes}, LOCAL_RANK={local}), but rallyrun starts the workers of an instance itself; "
            "set process_count_per_instance: 1, and set --nproc-per-node to the number of workers"
        )
    count = nodes or world
    if not is_host(host) or count is None or index >= count:
        return DetectionRefusal(
            f"the variables of Azure Machine Learning are inconsistent or incomplete: NODE_RANK={index}, number of "
            f"instances: {count or 'unknown'}, MASTER_ADDR={host[:70]!r}; {_GIVE}"
        )
    job = name_of_job(environ, "AZUREML_RUN_ID")
    return Cluster(
        title=f"Azure ML job {job}" if job else "the Azure ML job",
        nodes=count,
        index=index,
        host=host,
        port=number(environ, "MASTER_PORT", 1, 65535) or 29400,
        job_id=f"azureml-{job}" if job else "",
        hosts_here=index == 0,
        origins={
            "nnodes": "AZUREML_NODE_COUNT" if nodes else "WORLD_SIZE",
            "node_rank": "NODE_RANK",
            "rdzv_endpoint": "--rdzv-endpoint (from MASTER_ADDR and MASTER_PORT)",
            "rdzv_id": "AZUREML_RUN_ID",
        },
    )
