"""`--cluster=auto` under a real Slurm: a job needs no other flag, and never meets another job."""

from __future__ import annotations

import importlib.util
import re
import signal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rallypoint.base.devices import cpu_count
from rallypoint.clusters.hostlist import HostlistError, expand
from tests.effort import examples
from tests.slurm.cluster import Slurm
from tests.slurm.jobs import SlurmJobs
from tests.unit.cluster.test_hostlist import BAD_FOR_BOTH, GOOD

AUTO = "--cluster=auto"
PORT = re.compile(r"control plane listens on port (\d+)")


def ports(lines: list[str]) -> list[int]:
    return [int(match[1]) for match in map(PORT.search, lines) if match]


def test_two_nodes_by_one_command(jobs: SlurmJobs) -> None:
    """Directly by srun, without a batch script."""
    jobs.finish()
    command = jobs.rallyrun(AUTO, "--nproc-per-node=auto")
    out = jobs.cluster(
        *("srun", "-N2", "--ntasks-per-node=1", f"--chdir={jobs.folder}", "sh", "-c", command), env=jobs.env
    )
    workers = 2 * min(2, cpu_count())
    ups = [line.partition(" in run")[0] for line in out.splitlines() if line.endswith(": up")]
    assert sorted(ups) == [f"rank {rank} of {workers}" for rank in range(workers)]


def test_what_is_not_one_task_for_each_node_is_refused(jobs: SlurmJobs) -> None:
    words = jobs.rallyrun(AUTO)
    job = jobs.batch(
        f"srun -n4 --label {words}; echo tasks $?",
        f"{words}; echo script $?",
        f"env -u SLURM_STEP_NODELIST srun --label sh -c 'unset SLURM_STEP_NODELIST; exec {words}'; echo hosts $?",
        nodes=2,
    )
    assert job.ends() == "COMPLETED"
    assert job.count(r"has 2 tasks per node \(SLURM_STEP_TASKS_PER_NODE=2\(x2\)\)") == 4
    assert job.count(r"has 2 nodes, but this process was started without srun") == 1
    assert job.count(r"are unknown: SLURM_STEP_NODELIST is not set") == 2
    assert [line for line in job.lines if line in {"tasks 2", "script 2", "hosts 2"}] == [
        "tasks 2",
        "script 2",
        "hosts 2",
    ]
    assert job.count("Traceback") == 0


def test_two_jobs_and_two_steps_at_once_on_the_same_nodes_do_not_meet(jobs: SlurmJobs) -> None:
    srun = "LOGLEVEL=INFO srun --overlap --label " + jobs.rallyrun(AUTO, "--nproc-per-node=1")
    one = jobs.batch(f"{srun} &", f"{srun} &", "wait", nodes=2, options=["--oversubscribe", "--nodelist=n[1-2]"])
    other = jobs.batch(srun, nodes=2, options=["--oversubscribe", "--nodelist=n[1-2]"])
    one.until(lambda: one.count("of 2 in run 0: up") == 4, "two steps are up")
    other.until_up(2)
    one.until(lambda: len(ports([*one.lines, *other.lines])) == 3, "all ports are told")  # srun passes each stream on
    assert (one.state, other.state) == ("RUNNING", "RUNNING")
    both = [*one.lines, *other.lines]
    assert len(set(ports(both))) == len(ports(both)) == 3
    ids = {match[1] for match in (re.search(r"run_id +: (\S+)", line) for line in both) if match}
    assert ids == {f"slurm-{one.number}.0.0", f"slurm-{one.number}.1.0", f"slurm-{other.number}.0.0"}
    jobs.finish()
    assert (one.ends(), other.ends()) == ("COMPLETED", "COMPLETED")


def test_a_port_that_is_taken_is_said(jobs: SlurmJobs) -> None:
    """Two jobs whose numbers lead to one port cannot be had here, so that somebody else has it."""
    taken = (
        "import socket, sys, time; s = socket.socket(); s.bind(('', int(sys.argv[1]))); s.listen(); "
        "print('taken', flush=True); time.sleep(60)"
    )
    find = "import os; from rallypoint.clusters.ports import control_port; "
    find += "print(control_port(int(os.environ['SLURM_JOB_ID']), 1, 0, "
    find += "open('/proc/sys/net/ipv4/ip_local_port_range').read())[0])"
    python = jobs.rallyrun().split(" ")[0]
    job = jobs.batch(
        f'port=$({python} -c "{find}")',
        f'srun --overlap -N1 -n1 -w n1 {python} -c "{taken}" $port & taken=$!',
        "while ! grep -q ^taken output-0; do sleep 0.05; done",
        f"srun --overlap --kill-on-bad-exit=1 {jobs.rallyrun(AUTO)}; echo ended $?",
        "kill $taken; wait",
        nodes=2,
    )
    assert job.ends() == "COMPLETED"
    assert job.count(r"the control plane cannot listen at n1:\d+: Address already in use; .*choose another port") == 1
    assert job.count("^ended [1-9]") == 1


def test_without_the_flag_one_node_warns_of_worlds_of_one(jobs: SlurmJobs) -> None:
    jobs.finish()
    job = jobs.batch(f"srun --label {jobs.rallyrun()}", nodes=2)
    assert job.ends() == "COMPLETED"
    assert job.count("of 1 in run 0: up") == 2
    assert job.count(r"0: .*step 0 has 2 nodes, but --nnodes is 1, so each node runs a job of its own") == 1
    assert job.count("runs a job of its own") == 1


def test_the_step_of_a_node_is_killed_and_the_others_go_on(jobs: SlurmJobs) -> None:
    """The kernel's out-of-memory killer and a broken slurmd do that. Without --wait, srun waits for that node."""
    job = jobs.batch(
        f"srun --no-kill --wait=1 --label {jobs.rallyrun(AUTO, '--nnodes=1:2', '--nproc-per-node=1')}", nodes=2
    )
    job.until_up(2)
    jobs.kill_step("n2")
    job.until_up(1)
    job.until_said(r"n2 \(rank 1\) was lost")  # srun passes each stream on by itself
    jobs.finish()
    assert job.ends() == "COMPLETED"
    assert job.count("rank 0 of 1 in run 0: done") == 1
    jobs.forget_temporary()


@pytest.mark.parametrize("kill", [0, 1])
def test_kill_on_bad_exit_decides_whether_a_lost_agent_costs_the_step(jobs: SlurmJobs, kill: int) -> None:
    words = jobs.rallyrun(AUTO, "--nnodes=1:2", "--nproc-per-node=1")
    job = jobs.batch(f"srun --no-kill --kill-on-bad-exit={kill} --label {words}", nodes=2)
    job.until_up(2)
    jobs.kill("n2", "rallypoint.run", signal.SIGKILL)
    if not kill:
        job.until_up(1)
        jobs.finish()
    assert job.ends() == "COMPLETED"
    assert job.count("srun has ended with 137") == 1
    assert job.count("rank 0 of 1 in run 0: done") == 1 - kill
    assert job.count(f"STEP {job.number}.0 ON n1 CANCELLED") == kill
    jobs.forget_temporary()


_NUMBERS = st.integers(0, 999)
_RANGES = st.tuples(_NUMBERS, st.integers(0, 30), st.integers(0, 3)).map(
    lambda each: f"{each[0]:0{each[2]}}-{each[0] + each[1]:0{each[2]}}" if each[1] else f"{each[0]:0{each[2]}}"
)
_BRACKETS = st.lists(_RANGES, min_size=1, max_size=3).map(lambda each: f"[{','.join(each)}]")
_NAMES = st.from_regex(r"[a-z]{1,4}[a-z0-9.-]{0,3}[a-z0-9]", fullmatch=True)
_ITEMS = st.one_of(_NAMES, st.lists(st.tuples(_NAMES, _BRACKETS).map("".join), min_size=1, max_size=2).map("".join))


def by_slurm(cluster: Slurm, text: str) -> list[str]:
    """Nothing, with a line on standard error, if it is no list."""
    return cluster("scontrol", "show", "hostnames", text).split()


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(items=st.lists(_ITEMS, min_size=1, max_size=12))
def test_lists_of_hosts_are_those_of_scontrol(the_slurm: Slurm, items: list[str]) -> None:
    text = ",".join(items)
    assert expand(text) == by_slurm(the_slurm, text)


def test_lists_by_hand_are_those_of_scontrol(the_slurm: Slurm) -> None:
    for text in GOOD:
        assert by_slurm(the_slurm, text) == expand(text), text
    for text in BAD_FOR_BOTH:
        assert by_slurm(the_slurm, text) == [], text
        with pytest.raises(HostlistError):
            expand(text)


JAX_WORKER = """
import os, jax
jax.distributed.initialize()
mine = jax.numpy.ones(jax.local_device_count())
total = int(jax.pmap(lambda each: jax.lax.psum(each, "all"), "all")(mine)[0])
os.write(1, f"process {jax.process_index()} of {jax.process_count()}, sum {total}\\n".encode())
"""


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed (pip install jax)")
def test_in_a_step_of_two_nodes_jax_needs_no_argument(jobs: SlurmJobs) -> None:
    """The task that Slurm tells of is the agent's, and each worker finds itself anyway."""
    (jobs.folder / "worker.py").write_text(JAX_WORKER)
    command = jobs.rallyrun(AUTO, "--nproc-per-node=2", "--worker-env=jax")
    env = {**jobs.env, "JAX_PLATFORMS": "cpu"}
    out = jobs.cluster("srun", "-N2", "--ntasks-per-node=1", f"--chdir={jobs.folder}", "sh", "-c", command, env=env)
    found = re.findall(r"process \d of \d, sum \d", out)  # gloo writes to the same lines
    assert sorted(found) == [f"process {rank} of 4, sum 4" for rank in range(4)]
