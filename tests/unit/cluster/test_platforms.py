"""Jobs from the variables of batch systems and platforms.

The rows come from the documents that each module names, not from recorded runs.
"""

from __future__ import annotations

import json
from itertools import permutations
from typing import NamedTuple

import pytest

from rallypoint.base.errors import UsageError
from rallypoint.cli.parse import parse
from rallypoint.clusters.detect import FAMILIES, find
from rallypoint.clusters.findings import Cluster, DetectionRefusal, Machine, NoCluster, place_of
from rallypoint.clusters.ports import control_port
from tests.unit.cluster.test_detect import INDEXED, OPEN_MPI, POD, STEP, env

NODEFILE = "n1.cluster\nn2.cluster\n"
PBS_SCRIPT = env(
    "PBS_JOBID=1234.server PBS_NODEFILE=/var/spool/pbs/aux/1234.server PBS_NODENUM=0 PBS_TASKNUM=1 "
    "PBS_ENVIRONMENT=PBS_BATCH PBS_O_WORKDIR=/home/user NCPUS=8"
)
PBS_TASK = {**PBS_SCRIPT, "PBS_NODENUM": "1", "PBS_TASKNUM": "00000001"}
LSF_SCRIPT = env("LSB_JOBID=3856 LSB_JOBINDEX=0") | {"LSB_MCPU_HOSTS": "hostA 1 hostB 1", "LSB_HOSTS": "hostA hostB"}
LSF_TASK = {**LSF_SCRIPT, "LSF_PM_TASKID": "2"}
FLUX = env(
    "FLUX_JOB_NNODES=2 FLUX_JOB_SIZE=2 FLUX_TASK_RANK=1 FLUX_TASK_LOCAL_ID=0 FLUX_URI=local:///run/flux/local "
    "PMI_RANK=1 PMI_SIZE=2 PMI_FD=17"
) | {"FLUX_JOB_ID": "\u0192JqUHUCzX9"}
SKYPILOT = env(
    "SKYPILOT_NODE_RANK=1 SKYPILOT_NUM_NODES=2 SKYPILOT_NUM_GPUS_PER_NODE=8 "
    "SKYPILOT_TASK_ID=sky-2023-07-06-21-18-31-563597_myclus_1"
) | {"SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5"}
DSTACK = env(
    "DSTACK_RUN_NAME=train-distrib DSTACK_NODES_NUM=3 DSTACK_NODE_RANK=2 DSTACK_MASTER_NODE_IP=10.128.0.47 "
    "DSTACK_GPUS_PER_NODE=4 DSTACK_GPUS_NUM=12"
) | {"DSTACK_NODES_IPS": "10.128.0.47\n10.128.0.48\n10.128.0.49"}
SAGEMAKER = env("SM_CURRENT_HOST=algo-2 SM_NUM_GPUS=8 SM_NUM_CPUS=96 TRAINING_JOB_NAME=train-2026-11-28")
SAGEMAKER |= {"SM_HOSTS": '["algo-1","algo-2"]'}
SAGEMAKER |= {"SM_RESOURCE_CONFIG": '{"current_host":"algo-2","hosts":["algo-1","algo-2"]}'}
RESOURCE_CONFIG = json.dumps({"current_host": "algo-1", "current_instance_group": "a", "hosts": ["algo-2", "algo-1"]})
AZUREML = env(
    "AZUREML_RUN_ID=quiet_rain_4x2 AZUREML_NODE_COUNT=2 NODE_RANK=1 MASTER_ADDR=10.0.0.4 MASTER_PORT=6105 "
    "WORLD_SIZE=2 RANK=1 LOCAL_RANK=0"
)
VOLCANO_PYTORCH = env(
    "MASTER_ADDR=pytorch-job-master-0.pytorch-job MASTER_PORT=23456 WORLD_SIZE=3 RANK=2 "
    "VC_MASTER_HOSTS=pytorch-job-master-0.pytorch-job VC_MASTER_NUM=1 "
    "VC_WORKER_HOSTS=pytorch-job-worker-0.pytorch-job,pytorch-job-worker-1.pytorch-job VC_WORKER_NUM=2"
)
VOLCANO_TASK = env(
    "VC_TASK_INDEX=1 VK_TASK_INDEX=1 VC_WORKER_HOSTS=train-worker-0.train,train-worker-1.train VC_WORKER_NUM=2"
)
PALS = env("PMI_SIZE=2 PMI_RANK=1 PMI_LOCAL_SIZE=1 PALS_RANKID=1 PALS_NODEID=1")
JSRUN = env("JSM_NAMESPACE_SIZE=2 JSM_NAMESPACE_RANK=0 JSM_NAMESPACE_LOCAL_SIZE=1 OMPI_COMM_WORLD_SIZE=2")
JSRUN |= {"LSB_JOBID": "3856", "LSB_MCPU_HOSTS": "batch1 1 hostA 42 hostB 42"}


class Row(NamedTuple):
    """An environment, its family, and the job."""

    family: str
    environ: dict[str, str]
    nodes: int
    place: int
    host: str
    port: int
    job_id: str
    machine: Machine = Machine(hostname="n2")


def port_of(number: int, part: int = 0) -> int:
    return control_port(number, part)[0]


ROWS = (
    Row("pbs", PBS_TASK, 2, 1, "n1.cluster", port_of(1234), "pbs-1234", Machine(hostname="n2", job_file=NODEFILE)),
    Row("lsf", LSF_TASK, 2, 1, "hostA", port_of(3856), "lsf-3856.0", Machine(hostname="hostB.site")),
    Row("flux", FLUX, 2, 1, "", 0, "flux-fJqUHUCzX9"),
    Row("skypilot", SKYPILOT, 2, 1, "10.0.0.4", 0, f"sky-{SKYPILOT['SKYPILOT_TASK_ID']}"),
    Row("dstack", DSTACK, 3, 2, "10.128.0.47", 0, "dstack-train-distrib"),
    Row("sagemaker", SAGEMAKER, 2, 1, "algo-1", 29400, "sagemaker-train-2026-11-28"),
    Row(
        *("sagemaker", {"TRAINING_JOB_NAME": "j"}, 2, 0, "algo-1", 29400, "sagemaker-j"),
        machine=Machine(job_file=RESOURCE_CONFIG),
    ),
    Row("azureml", AZUREML, 2, 1, "10.0.0.4", 6105, "azureml-quiet_rain_4x2"),
    Row("volcano", VOLCANO_PYTORCH, 3, 2, "pytorch-job-master-0.pytorch-job", 23456, "volcano-pytorch-job"),
    Row("volcano", VOLCANO_TASK, 2, 1, "train-worker-0.train", 29400, "volcano-train"),
    Row(
        *("mpi", {**PBS_SCRIPT, **PALS}, 2, 1, "n1.cluster", 0, ""),
        machine=Machine(hostname="n2", job_file=NODEFILE),
    ),
    Row("mpi", {**LSF_SCRIPT, **OPEN_MPI}, 2, 1, "hostA", 0, "mpi-593362945"),
    Row("mpi", JSRUN, 2, 0, "hostA", 0, ""),
)


SECOND = Machine(hostname="n2")


def of(environ: dict[str, str], machine: Machine = SECOND, which: str = "auto") -> Cluster:
    finding = find(which, environ, machine)
    assert isinstance(finding, Cluster), finding
    return finding


def refused(environ: dict[str, str], machine: Machine = SECOND) -> str:
    finding = find("auto", environ, machine)
    assert isinstance(finding, DetectionRefusal), finding
    return finding.sentence


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.family}-{number}" for number, row in enumerate(ROWS)])
def test_jobs(row: Row) -> None:
    for which in ("auto", row.family):
        found = of(row.environ, row.machine, which)
        assert (found.nodes, found.index, found.host, found.job_id) == (row.nodes, row.place, row.host, row.job_id)
        assert found.port == row.port or (not row.port and 5000 <= found.port < 32768)
        assert found.hosts_here is (row.place == 0 and row.family != "mpi")


def test_families_of_the_flag() -> None:
    nothing = find("auto", {}, Machine())
    assert isinstance(nothing, NoCluster)
    for family in FAMILIES:
        options = parse([f"--cluster={family.flag}", "train.py"], {})
        assert options.features.command.cluster == family.flag
        assert isinstance(find(family.flag, {}, Machine()), NoCluster)
        assert family.title in nothing.sentence


def test_resources() -> None:
    assert (of(SKYPILOT).gpus, of(DSTACK).gpus, of(SAGEMAKER).gpus, of(SAGEMAKER).cpus) == (8, 4, 8, 96)
    assert of(PBS_TASK, Machine(job_file=NODEFILE)).cpus == 8


# A node is a process that was started once per host


@pytest.mark.parametrize(
    ("environ", "machine", "start"),
    [
        (PBS_SCRIPT, Machine(hostname="n1", job_file=NODEFILE), "mpiexec -ppn 1 rallyrun ..., or pbsdsh -- rallyrun"),
        (LSF_SCRIPT, Machine(hostname="hostA"), "blaunch rallyrun ... in a job of bsub -n HOSTS -R 'span[ptile=1]'"),
    ],
)
def test_a_script_with_several_hosts(environ: dict[str, str], machine: Machine, start: str) -> None:
    sentence = refused(environ, machine)
    assert " has 2 hosts, but this process is its script or a shell on one of them" in sentence
    assert start in sentence
    assert "--standalone" in sentence


def test_a_script_with_one_host() -> None:
    alone = of(PBS_SCRIPT, Machine(hostname="n1", job_file="n1\nn1\nn1\n"))
    assert (alone.nodes, alone.index, alone.cpus) == (1, 0, 8)
    assert of({**LSF_SCRIPT, "LSB_MCPU_HOSTS": "hostA 4"}).nodes == 1


def test_unknown_hosts() -> None:
    for environ in (PBS_SCRIPT, {"LSB_JOBID": "1"}, {"FLUX_URI": "local:///run/flux/local"}):
        nothing = find("auto", environ, Machine())
        assert isinstance(nothing, NoCluster)
    task = of(PBS_TASK)  # only the first host has the file
    assert (task.nodes, task.host) == (None, "")
    assert "set PBS_NODEFILE to a copy of the script's file" in task.wanted["nnodes"]
    assert "set PBS_NODEFILE to a copy" in task.wanted["rdzv_endpoint"]
    torque = of({**PBS_TASK, "PBS_NUM_NODES": "4"})
    assert (torque.nodes, torque.host, torque.origins["nnodes"]) == (4, "", "PBS_NUM_NODES")
    assert "$(flux hostlist -l -n 0):29400" in of(FLUX).wanted["rdzv_endpoint"]
    assert "LSB_MCPU_HOSTS and LSB_HOSTS are not set" in refused({"LSB_JOBID": "1", "LSF_PM_TASKID": "1"})
    assert of({**SKYPILOT, "SKYPILOT_NODE_IPS": ""}).wanted["rdzv_endpoint"].endswith("HOST:29400")
    assert of({**SKYPILOT, "SKYPILOT_NODE_IPS": "fd00::4\nfd00::5"}).host == "fd00::4"


@pytest.mark.parametrize(
    ("environ", "machine", "sentence"),
    [
        (PBS_TASK, Machine(job_file="n1\nn1\nn2\nn2\n"), "lists n1 2 times in PBS_NODEFILE"),
        ({**LSF_TASK, "LSB_MCPU_HOSTS": "hostA 2 hostB 2"}, Machine(hostname="hostA"), "this is task 2 of blaunch"),
        ({**LSF_TASK, "LSF_PM_TASKID": "3"}, Machine(hostname="hostB"), "submit with bsub -n 2 -R 'span[ptile=1]'"),
        ({**FLUX, "FLUX_JOB_SIZE": "8"}, Machine(), "Flux job fJqUHUCzX9 has 8 tasks on 2 nodes"),
        ({**AZUREML, "WORLD_SIZE": "8"}, Machine(), "set process_count_per_instance: 1"),
        ({**AZUREML, "LOCAL_RANK": "3"}, Machine(), "LOCAL_RANK=3"),
        ({**VOLCANO_PYTORCH, "VC_TASK_INDEX": "1", "MASTER_ADDR": ""}, Machine(), "are inconsistent or incomplete"),
        (
            {name: text for name, text in VOLCANO_PYTORCH.items() if name.startswith("VC_")} | {"VC_TASK_INDEX": "1"},
            Machine(),
            "2 tasks (VC_MASTER_HOSTS, VC_WORKER_HOSTS)",
        ),
    ],
)
def test_several_processes_on_a_host(environ: dict[str, str], machine: Machine, sentence: str) -> None:
    assert sentence in refused(environ, machine)


@pytest.mark.parametrize(
    ("environ", "machine"),
    [
        ({**PBS_TASK, "PBS_NODENUM": "2"}, Machine(job_file=NODEFILE)),
        (PBS_TASK, Machine(job_file="n1\n-rf /\n")),
        ({**LSF_TASK, "LSB_MCPU_HOSTS": "$(rm) 1"}, Machine()),
        ({**FLUX, "FLUX_TASK_RANK": "2"}, Machine()),
        ({**FLUX, "FLUX_JOB_SIZE": ""}, Machine()),
        ({**SKYPILOT, "SKYPILOT_NODE_IPS": "10.0.0.4"}, Machine()),
        ({**SKYPILOT, "SKYPILOT_NODE_IPS": "10.0.0.4\n;rm"}, Machine()),
        ({**DSTACK, "DSTACK_NODE_RANK": "3"}, Machine()),
        ({**SAGEMAKER, "SM_CURRENT_HOST": "algo-3"}, Machine()),
        ({**SAGEMAKER, "SM_HOSTS": '["algo-1","algo-1"]'}, Machine()),
        ({**AZUREML, "NODE_RANK": "2"}, Machine()),
        ({**AZUREML, "MASTER_ADDR": "a b"}, Machine()),
        ({**VOLCANO_TASK, "VC_TASK_INDEX": "2"}, Machine()),
        ({**VOLCANO_TASK, "VC_WORKER_HOSTS": "a b,c"}, Machine()),
    ],
)
def test_contradictions(environ: dict[str, str], machine: Machine) -> None:
    assert "--nnodes, --node-rank and --rdzv-endpoint" in refused(environ, machine)


def test_place_of_a_host() -> None:
    hosts = ["n1.a", "n2.a", "n3.a", "n3.b"]
    assert [place_of(name, hosts) for name in ("n2", "n1.a", "n2.other", "n3", "n4")] == [1, 0, 1, None, None]
    renamed = of(LSF_TASK, Machine(hostname="other"))
    assert renamed.index == 1  # from the task's number
    assert of({**LSF_TASK, "LSF_PM_TASKID": "1"}, Machine(hostname="hostB")).index == 1  # from the host's name


# Nested systems: the innermost counts


@pytest.mark.parametrize(
    ("around", "inside", "which"),
    [
        (STEP, SKYPILOT, "skypilot"),
        (INDEXED, SKYPILOT, "skypilot"),
        (INDEXED, DSTACK, "dstack"),
        (VOLCANO_PYTORCH, AZUREML, "azureml"),
        (INDEXED, VOLCANO_TASK, "volcano"),
        (STEP, FLUX, "flux"),
        (LSF_SCRIPT, FLUX, "flux"),
        (INDEXED, FLUX, "flux"),
        (PBS_SCRIPT, STEP, "slurm"),
        (FLUX, OPEN_MPI, "mpi"),
        (SKYPILOT, OPEN_MPI, "mpi"),
    ],
)
def test_nested_systems(around: dict[str, str], inside: dict[str, str], which: str) -> None:
    machine = Machine(hostname=POD.hostname, job_file=NODEFILE)
    assert find("auto", {**around, **inside}, machine) == find(which, {**around, **inside}, machine)
    assert isinstance(find("auto", {**around, **inside}, machine), Cluster)


def test_jobs_have_different_ports() -> None:
    machine = Machine(job_file=NODEFILE)
    ids = ["1234.server", "1235.server", "1234[1].server", "1234[2].server"]
    found = [of({**PBS_TASK, "PBS_JOBID": text}, machine) for text in ids]
    assert len({job.port for job in found}) == len({job.job_id for job in found}) == len(ids)
    names = ["sky-1_a_1", "sky-1_b_1", "sky-1_a_2"]
    assert len({of({**SKYPILOT, "SKYPILOT_TASK_ID": name}).port for name in names}) == len(names)


def test_mpi_inside_a_job() -> None:
    def host(environ: dict[str, str], machine: Machine) -> str:
        return of(environ, machine, "mpi").host

    two = Machine(hostname="n1", job_file=NODEFILE)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[3-4]"}
    assert host({**job, **OPEN_MPI}, two) == "n3"
    assert host({**PBS_SCRIPT, **PALS}, Machine(hostname="n2")) == ""  # only the first host has the file
    for changed in ({"SLURM_JOB_NODELIST": "n[3-5]"}, {"SLURM_JOB_NODELIST": "n["}, {"SLURM_JOB_NODELIST": ""}):
        assert host({**job, **OPEN_MPI, **changed}, two) == ""
    first, second = (of({**PBS_SCRIPT, **PALS, "PBS_JOBID": text}, two) for text in ("1.s", "2.s"))
    assert first.port != second.port


# Invalid values

NUMBERS = {
    name: row
    for row in ROWS
    for name in row.environ
    if name.endswith(("_RANK", "_NUM_NODES", "_NODES_NUM", "JOBID", "TASKID", "NODENUM", "NNODES", "_PORT", "_INDEX"))
    and name
    not in ("RANK", "VK_TASK_INDEX", "LOCAL_RANK", "MASTER_PORT", "PBS_JOBID", "PMI_RANK", "OMPI_COMM_WORLD_RANK")
    and row.family not in ("mpi",)
}
NUMBERS |= dict.fromkeys(
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_NODES", "SLURM_NODEID"), Row("slurm", STEP, 2, 1, "n2", 0, "")
)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("text", ["x", "-1", "1.5", "99999999999", "\u0661", "1\x1b[31m"])
def test_invalid_numbers(name: str, text: str) -> None:
    row = NUMBERS[name]
    with pytest.raises(UsageError, match=name) as caught:
        find(row.family, {**row.environ, name: text}, row.machine)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("text", ["x", "-1", "99999999999", "\u0661", "1\x1b[31m", "1[2", "1;rm"])
def test_invalid_pbs_job_ids(text: str) -> None:
    with pytest.raises(UsageError, match="PBS_JOBID") as caught:
        find("pbs", {**PBS_TASK, "PBS_JOBID": text}, SECOND)
    assert str(caught.value).isprintable()


def test_the_order_of_variables_does_not_matter() -> None:
    some = list(VOLCANO_PYTORCH.items())[:5]
    assert len({repr(find("volcano", dict(order), Machine())) for order in permutations(some)}) == 1
