"""What a step of Slurm says; the variables are those that Slurm 22.05 has set."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.base.errors import UsageError
from rallypoint.clusters.detect import Cluster, Machine, Nothing, Refusal, control_port, find
from tests.effort import examples

JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "3", "SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "n[1-3]"}
BATCH = {**JOB, "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURMD_NODENAME": "n1", "SLURM_CPUS_ON_NODE": "2"}
STEP = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[2-3]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURMD_NODENAME": "n3",
}
MACHINE = Machine(hostname="n3", ephemeral="32768\t60999\n")


def found(**changed: str | None) -> Cluster:
    finding = find("slurm", {name: text for name, text in {**STEP, **changed}.items() if text is not None}, MACHINE)
    assert isinstance(finding, Cluster)
    return finding


def refused(**changed: str | None) -> str:
    finding = find("slurm", {name: text for name, text in {**STEP, **changed}.items() if text is not None}, MACHINE)
    assert isinstance(finding, Refusal)
    return finding.sentence


def test_a_step() -> None:
    cluster = found()
    assert (cluster.title, cluster.nodes, cluster.index) == ("Slurm job 12 step 0", 2, 1)
    assert (cluster.host, cluster.port, cluster.job_id) == ("n2", control_port(12)[0], "slurm-12.0.0")
    assert (cluster.hosts_here, cluster.gpus, cluster.cpus, cluster.remark) == (False, None, 2, "")
    assert found(SLURM_NODEID="0", SLURMD_NODENAME="n2").hosts_here
    assert found(SLURM_NODEID="0", SLURMD_NODENAME=None).hosts_here


def test_a_step_of_a_heterogeneous_job_names_the_hosts_of_all_its_components() -> None:
    together = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST": "n1", "SLURM_STEP_NODELIST": "n[1-3]"}
    cluster = found(**together, SLURM_STEP_NUM_NODES="3", SLURM_STEP_TASKS_PER_NODE="1(x3)")
    assert (cluster.nodes, cluster.host) == (3, "n1")


def test_restarts_and_steps_are_jobs_of_their_own() -> None:
    beside = [found(), found(SLURM_RESTART_COUNT="1"), found(SLURM_STEP_ID="1"), found(SLURM_JOB_ID="13")]
    assert [each.job_id for each in beside] == ["slurm-12.0.0", "slurm-12.0.1", "slurm-12.1.0", "slurm-13.0.0"]
    assert len({each.port for each in beside}) == 4


def test_what_the_task_may_use() -> None:
    assert found(SLURM_CPUS_PER_TASK="8").cpus == 8
    assert found(SLURM_CPUS_ON_NODE=None).cpus is None
    assert found(SLURM_GPUS_ON_NODE="4").gpus == 4


def test_a_kernel_without_ports_of_its_own_is_remarked_on() -> None:
    finding = find("slurm", STEP, Machine(ephemeral="1024\t65535\n"))
    assert isinstance(finding, Cluster)
    assert "ip_local_port_range=1024\t65535" in finding.remark


@pytest.mark.parametrize(("tasks", "most"), [("2(x2)", 2), ("2,1", 2), ("1,4(x3),2", 4)])
def test_several_tasks_on_a_node(tasks: str, most: int) -> None:
    sentence = refused(SLURM_STEP_TASKS_PER_NODE=tasks)
    assert f"has {most} tasks on a node (SLURM_STEP_TASKS_PER_NODE={tasks})" in sentence
    assert "srun --ntasks-per-node=1" in sentence


def test_a_batch_script_a_shell_and_one_by_ssh() -> None:
    for environ in (BATCH, JOB, {**STEP, "SLURM_STEP_ID": "4294967290"}, {**STEP, "SLURM_STEP_ID": "4294967291"}):
        finding = find("slurm", environ, MACHINE)
        assert isinstance(finding, Refusal)
        assert finding.sentence.startswith("Slurm job 12 has 3 nodes, and this process was started without srun")
    alone = find("slurm", {**BATCH, "SLURM_JOB_NUM_NODES": "1"}, MACHINE)
    assert isinstance(alone, Cluster)
    assert (alone.nodes, alone.cpus) == (1, 2)
    for environ, word in (({"SLURM_JOB_ID": "12"}, "as after ssh"), ({}, "SLURM_JOB_ID is not set")):
        nothing = find("slurm", environ, MACHINE)
        assert isinstance(nothing, Nothing)
        assert word in nothing.sentence


@pytest.mark.parametrize("name", ["SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_NODEID"])
def test_a_step_without_hosts(name: str) -> None:
    for array in ({}, {"SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": "4"}):
        assert f"which hosts it has: {name} is not set" in refused(**array, **{name: None})


def test_what_contradicts_itself() -> None:
    assert "names 3 hosts, SLURM_STEP_NUM_NODES=2" in refused(SLURM_STEP_NODELIST="n[1-3]")
    assert "contradicts" in refused(SLURM_NODEID="2")
    assert "contradicts" in refused(SLURM_STEP_NODELIST="n;rm,n2")
    assert "is not a list of hosts: a bracket is not closed" in refused(SLURM_STEP_NODELIST="n[1-2")


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_NODES", "SLURM_NODEID"])
@pytest.mark.parametrize("text", ["x", "-1", "1.5", "99999999999", "\u0661", "1\x1b[31m"])
def test_what_is_no_number_is_named(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=name) as caught:
        find("slurm", {**STEP, name: text}, MACHINE)
    assert str(caught.value).isprintable()


_VALUES = st.one_of(st.text(max_size=12), st.sampled_from(["0", "1", "2", "n[1-2]", "n[", "1(x2)", "4294967290"]))


@settings(max_examples=examples(300))
@given(st.dictionaries(st.sampled_from([*STEP, "SLURM_RESTART_COUNT", "SLURM_GPUS_ON_NODE"]), _VALUES))
def test_any_values_are_found_or_refused_in_a_sentence(changed: dict[str, str]) -> None:
    try:
        finding = find("slurm", {**STEP, **changed}, MACHINE)
    except UsageError as error:
        finding = Refusal(str(error))
    if isinstance(finding, Cluster):
        assert finding.index < (finding.nodes or 0)
    else:
        assert finding.sentence.isprintable()
