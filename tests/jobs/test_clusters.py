"""Two agents find each other through the variables of a cluster alone, on the loopback."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs.launching import Launcher
from tests.ports import free_port

SCRIPT = """
import os
e = os.environ
os.write(1, f"rank {e['RANK']} of {e['WORLD_SIZE']} on node {e['GROUP_RANK']}\\n".encode())
"""
HOSTS = ("127.0.0.1", "127.0.0.2")


def skypilot(_folder: Path) -> list[dict[str, str]]:
    job = {"SKYPILOT_NODE_IPS": "\n".join(HOSTS), "SKYPILOT_NUM_NODES": "2", "SKYPILOT_TASK_ID": uuid.uuid4().hex}
    return [{**job, "SKYPILOT_NODE_RANK": rank, "SKYPILOT_NUM_GPUS_PER_NODE": "0"} for rank in ("0", "1")]


def pbs(folder: Path) -> list[dict[str, str]]:
    nodes = folder / "nodes"
    nodes.write_text("\n".join(HOSTS))
    job = {"PBS_JOBID": f"{random.randrange(1, 1 << 31)}.server", "PBS_NODEFILE": str(nodes), "PBS_TASKNUM": "00000002"}
    return [{**job, "PBS_NODENUM": number} for number in ("0", "1")]


def lsf(_folder: Path) -> list[dict[str, str]]:
    job = {"LSB_JOBID": str(random.randrange(1, 1 << 31)), "LSB_MCPU_HOSTS": " ".join(f"{host} 1" for host in HOSTS)}
    return [{**job, "LSF_PM_TASKID": task} for task in ("1", "2")]


def azureml(_folder: Path) -> list[dict[str, str]]:
    job = {"AZUREML_RUN_ID": "quiet_rain", "AZUREML_NODE_COUNT": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    job |= {"MASTER_ADDR": HOSTS[0], "MASTER_PORT": str(free_port())}
    return [{**job, "NODE_RANK": rank, "RANK": rank} for rank in ("0", "1")]


@pytest.mark.parametrize("cluster", [skypilot, pbs, lsf, azureml])
def test_nodes_meet_by_the_variables_of(cluster: Callable[[Path], list[dict[str, str]]], rallyrun: Launcher) -> None:
    script = rallyrun.script(SCRIPT)
    zero, one = cluster(rallyrun.folder)
    flags = ("--cluster=auto", "--nproc-per-node=1")
    first = rallyrun(*flags, script, env=zero)
    second = rallyrun(*flags, "--rdzv-conf=is_host=false", script, env=one)  # the loopback is this machine for both
    assert (first.ends(), second.ends()) == (0, 0), first.err + second.err
    assert (first.out, second.out) == (["rank 0 of 2 on node 0"], ["rank 1 of 2 on node 1"])
