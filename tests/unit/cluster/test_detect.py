"""Jobs from the variables of clusters, and their ports."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.base.errors import UsageError
from rallypoint.clusters.detect import find
from rallypoint.clusters.findings import Cluster, DetectionRefusal, Machine, NoCluster
from rallypoint.clusters.ports import _USED_BY_OTHERS, DEFAULT_RANGE, control_port
from tests.effort import examples


def env(text: str) -> dict[str, str]:
    """Variables as `env` prints them."""
    return dict(word.split("=", 1) for word in text.split())


# Slurm steps; variables from Slurm 22.05

JOB = env("SLURM_JOB_ID=12 SLURM_JOB_NUM_NODES=3 SLURM_NNODES=3 SLURM_JOB_NODELIST=n[1-3]")
BATCH = JOB | env("SLURM_NODEID=0 SLURM_PROCID=0 SLURMD_NODENAME=n1 SLURM_CPUS_ON_NODE=2")
STEP = BATCH | env(
    "SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST=n[2-3] SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_NODEID=1 "
    "SLURM_PROCID=1 SLURMD_NODENAME=n3"
)
MACHINE = Machine(hostname="n3", ephemeral="32768\t60999\n")


def of_slurm(**changed: str | None) -> Cluster:
    finding = find("slurm", {name: text for name, text in {**STEP, **changed}.items() if text is not None}, MACHINE)
    assert isinstance(finding, Cluster)
    return finding


def refused_by_slurm(**changed: str | None) -> str:
    finding = find("slurm", {name: text for name, text in {**STEP, **changed}.items() if text is not None}, MACHINE)
    assert isinstance(finding, DetectionRefusal)
    return finding.sentence


def test_a_step() -> None:
    cluster = of_slurm()
    assert (cluster.title, cluster.nodes, cluster.index) == ("Slurm job 12 step 0", 2, 1)
    assert (cluster.host, cluster.port, cluster.job_id) == ("n2", control_port(12)[0], "slurm-12.0.0")
    assert (cluster.hosts_here, cluster.gpus, cluster.cpus, cluster.remark) == (False, None, 2, "")
    assert of_slurm(SLURM_NODEID="0", SLURMD_NODENAME="n2").hosts_here
    assert of_slurm(SLURM_NODEID="0", SLURMD_NODENAME=None).hosts_here


def test_a_step_of_a_heterogeneous_job() -> None:
    together = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST": "n1", "SLURM_STEP_NODELIST": "n[1-3]"}
    cluster = of_slurm(**together, SLURM_STEP_NUM_NODES="3", SLURM_STEP_TASKS_PER_NODE="1(x3)")
    assert (cluster.nodes, cluster.host) == (3, "n1")


def test_restarts_and_steps_are_separate_jobs() -> None:
    beside = [of_slurm(), of_slurm(SLURM_RESTART_COUNT="1"), of_slurm(SLURM_STEP_ID="1"), of_slurm(SLURM_JOB_ID="13")]
    assert [cluster.job_id for cluster in beside] == ["slurm-12.0.0", "slurm-12.0.1", "slurm-12.1.0", "slurm-13.0.0"]
    assert len({cluster.port for cluster in beside}) == 4


def test_resources_of_a_step() -> None:
    assert of_slurm(SLURM_CPUS_PER_TASK="8").cpus == 8
    assert of_slurm(SLURM_CPUS_ON_NODE=None).cpus is None
    assert of_slurm(SLURM_GPUS_ON_NODE="4").gpus == 4
    finding = find("slurm", STEP, Machine(ephemeral="1024\t65535\n"))
    assert isinstance(finding, Cluster)
    assert "ip_local_port_range=1024\t65535" in finding.remark


@pytest.mark.parametrize(("tasks", "most"), [("2(x2)", 2), ("2,1", 2), ("1,4(x3),2", 4)])
def test_several_tasks_on_a_node(tasks: str, most: int) -> None:
    sentence = refused_by_slurm(SLURM_STEP_TASKS_PER_NODE=tasks)
    assert f"has {most} tasks per node (SLURM_STEP_TASKS_PER_NODE={tasks})" in sentence
    assert "srun --ntasks-per-node=1" in sentence


def test_processes_outside_a_step() -> None:
    for environ in (BATCH, JOB, {**STEP, "SLURM_STEP_ID": "4294967290"}, {**STEP, "SLURM_STEP_ID": "4294967291"}):
        finding = find("slurm", environ, MACHINE)
        assert isinstance(finding, DetectionRefusal)
        assert finding.sentence.startswith("Slurm job 12 has 3 nodes, but this process was started without srun")
    alone = find("slurm", {**BATCH, "SLURM_JOB_NUM_NODES": "1"}, MACHINE)
    assert isinstance(alone, Cluster)
    assert (alone.nodes, alone.cpus) == (1, 2)
    for environ, word in (({"SLURM_JOB_ID": "12"}, "as after ssh"), ({}, "SLURM_JOB_ID is not set")):
        nothing = find("slurm", environ, MACHINE)
        assert isinstance(nothing, NoCluster)
        assert word in nothing.sentence


@pytest.mark.parametrize("name", ["SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_NODEID"])
def test_a_step_without_hosts(name: str) -> None:
    for array in ({}, {"SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": "4"}):
        assert f"are unknown: {name} is not set" in refused_by_slurm(**array, **{name: None})


def test_contradictions() -> None:
    assert "lists 3 hosts, SLURM_STEP_NUM_NODES=2" in refused_by_slurm(SLURM_STEP_NODELIST="n[1-3]")
    assert "are inconsistent" in refused_by_slurm(SLURM_NODEID="2")
    assert "are inconsistent" in refused_by_slurm(SLURM_STEP_NODELIST="n;rm,n2")
    assert "is not a valid list of hosts: a bracket is not closed" in refused_by_slurm(SLURM_STEP_NODELIST="n[1-2")


# MPI launchers; variables from Open MPI 4.1 and Hydra 4.0

OPEN_MPI = env("OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=1 PMIX_NAMESPACE=593362945")
HYDRA = env("PMI_SIZE=2 PMI_RANK=0 MPI_LOCALNRANKS=1")


def of_mpi(environ: dict[str, str]) -> Cluster:
    finding = find("mpi", environ, Machine())
    assert isinstance(finding, Cluster)
    return finding


def test_mpi() -> None:
    first, second = of_mpi(OPEN_MPI), of_mpi(HYDRA)
    assert (first.nodes, first.index, first.host, first.job_id) == (2, 1, "", "mpi-593362945")
    assert (second.nodes, second.index, second.host, second.job_id) == (2, 0, "", "")
    assert first.port != of_mpi({**OPEN_MPI, "PMIX_NAMESPACE": "593362946"}).port
    assert "--rdzv-backend=c10d --rdzv-endpoint=HOST:29400" in first.wanted["rdzv_endpoint"]
    single = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}
    finding = find("mpi", single, Machine(hostname="n1"))
    assert isinstance(finding, Cluster)
    assert (finding.nodes, finding.host, finding.hosts_here) == (1, "n1", True)
    assert finding.port > 0
    several = find("mpi", {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, Machine())
    assert isinstance(several, DetectionRefusal)
    assert "2 ranks on this host (OMPI_COMM_WORLD_LOCAL_SIZE=2)" in several.sentence
    assert "mpirun --map-by ppr:1:node --bind-to none rallyrun --nproc-per-node=2" in several.sentence


def test_no_mpi_launcher() -> None:
    assert isinstance(find("mpi", {}, Machine()), NoCluster)
    assert isinstance(find("mpi", {"PMI_SIZE": "2", "PMI_RANK": "0"}, Machine()), NoCluster)  # srun --mpi=pmi2
    contradiction = find("mpi", {**HYDRA, "PMI_RANK": "2"}, Machine())
    assert isinstance(contradiction, DetectionRefusal)
    with pytest.raises(UsageError, match="PMI_SIZE='many'"):
        find("mpi", {**HYDRA, "PMI_SIZE": "many"}, Machine())


# Pods of an Indexed Job

KUBELET = """# Kubernetes-managed hosts file.
127.0.0.1\tlocalhost
::1\tlocalhost ip6-localhost ip6-loopback
10.244.1.5\ttrain-1.workers.research.svc.cluster.local\ttrain-1
"""
POD = Machine(hostname="train-1", hosts_file=KUBELET, cpu_quota="250000 100000\n")
INDEXED = env("JOB_COMPLETION_INDEX=1 JOB_COMPLETIONS=4")


def of_k8s(environ: dict[str, str], machine: Machine = POD) -> Cluster:
    finding = find("k8s", environ, machine)
    assert isinstance(finding, Cluster)
    return finding


def test_a_pod_with_a_headless_service() -> None:
    cluster = of_k8s(INDEXED)
    assert (cluster.title, cluster.nodes, cluster.index) == ("Kubernetes Job train", 4, 1)
    assert (cluster.host, cluster.port) == ("train-0.workers.research.svc.cluster.local", 29400)
    assert (cluster.job_id, cluster.cpus, cluster.hosts_here) == ("k8s-train", 3, False)
    hosts = "10.244.1.9\ttune-workers-0-2.tune.default.svc.cluster.local\ttune-workers-0-2\n"
    of_set = of_k8s({**INDEXED, "JOB_COMPLETION_INDEX": "2"}, Machine(hostname="tune-workers-0-2", hosts_file=hosts))
    assert of_set.host == "tune-workers-0-0.tune.default.svc.cluster.local"


def test_a_named_service() -> None:
    assert of_k8s({**INDEXED, "RALLYPOINT_SERVICE": "other"}).host == "train-0.other"
    without = of_k8s(INDEXED, Machine(hostname="train-1", hosts_file="10.244.1.5\ttrain-1\n"))
    assert without.host == ""
    assert "set subdomain in the pod's template" in without.wanted["rdzv_endpoint"]
    bad = of_k8s({**INDEXED, "RALLYPOINT_SERVICE": "a b\x1b"})
    assert bad.host == ""
    assert bad.wanted["rdzv_endpoint"].isprintable()


def test_missing_variables_of_a_pod() -> None:
    cluster = of_k8s({"JOB_COMPLETION_INDEX": "1"})
    assert cluster.nodes is None
    assert "set JOB_COMPLETIONS" in cluster.wanted["nnodes"]
    renamed = of_k8s(INDEXED, Machine(hostname="gpu17", hosts_file=KUBELET))
    assert (renamed.host, renamed.job_id) == ("", "")
    assert "'gpu17' is not <job>-1" in renamed.wanted["rdzv_endpoint"]


def test_other_kubernetes_jobs() -> None:
    assert isinstance(find("k8s", {"JOB_COMPLETIONS": "4"}, POD), NoCluster)
    beyond = find("k8s", {**INDEXED, "JOB_COMPLETIONS": "1"}, POD)
    assert isinstance(beyond, DetectionRefusal)
    with pytest.raises(UsageError, match="JOB_COMPLETION_INDEX='one'"):
        find("k8s", {**INDEXED, "JOB_COMPLETION_INDEX": "one"}, POD)


@pytest.mark.parametrize(
    ("quota", "cpus"), [("max 100000\n", None), ("50000 100000\n", 1), ("0 0", None), ("", None), ("400000 100000", 4)]
)
def test_cpu_quota(quota: str, cpus: int | None) -> None:
    assert of_k8s(INDEXED, Machine(hostname="train-1", hosts_file=KUBELET, cpu_quota=quota)).cpus == cpus


# The port of a job

RANGES = ("32768 60999", "32768\t60999\n", "15000 61000", "10000 65000", "1024 20000", "9000 65500", "20000 60999")


@settings(max_examples=examples(300))
@given(st.integers(0, 2**32), st.integers(0, 500), st.integers(0, 50), st.sampled_from(RANGES))
def test_control_port(job: int, step: int, restart: int, ephemeral: str) -> None:
    port, is_outside = control_port(job, step, restart, ephemeral)
    low, high = map(int, ephemeral.split())
    assert is_outside
    assert 5000 <= port <= 65535
    assert not low <= port <= high
    assert port not in _USED_BY_OTHERS


@pytest.mark.parametrize("ephemeral", ["1024 65535", "5000 65535"])
def test_control_port_if_the_kernel_uses_all_ports(ephemeral: str) -> None:
    port, is_outside = control_port(12, 0, 0, ephemeral)
    assert (10000 <= port <= 32767, is_outside) == (True, False)


@pytest.mark.parametrize("text", ["", "x", "1 2 3", "60999 32768", "1 99999", "-1 5", "\u0661 \u0662"])
def test_control_port_with_an_invalid_range(text: str) -> None:
    assert control_port(12, ephemeral=text) == control_port(12, ephemeral=DEFAULT_RANGE)


def test_jobs_steps_and_restarts_have_different_ports() -> None:
    beside = [(1000 + job, step, restart) for job in range(50) for step in range(8) for restart in range(3)]
    assert len({control_port(*numbers)[0] for numbers in beside}) == len(beside)
