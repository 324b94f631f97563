"""A scheduler's actions on a job get their right names: notices, the end of all, the end of one node, a lost node."""

from __future__ import annotations

import os
import signal

from tests.jobs.launching import RALLYCTL
from tests.slurm.jobs import SlurmJobs


def test_a_notice_reaches_each_worker_once_and_ends_nothing(jobs: SlurmJobs) -> None:
    job = jobs.start("--nnodes=3", signals="SIGUSR1,SIGUSR2")
    job.until_up(3)
    for name in ("USR1", "USR2"):
        job.cancel(f"--signal={name}")
        job.until_said(f"heard SIG{name}", 3)
    jobs.finish()
    assert job.ends() == "COMPLETED"
    assert [job.count(f"heard SIG{name}") for name in ("USR1", "USR2")] == [3, 3]
    assert job.count("srun has ended with 0") == 1


def test_a_job_that_is_cancelled_is_stopped_and_has_not_failed(jobs: SlurmJobs) -> None:
    job = jobs.start("--nnodes=3", "--rdzv-conf=notice_timeout=50", signals="SIGUSR1")
    job.until_up(3)
    job.cancel()
    assert job.ends() == "CANCELLED"
    assert job.count("rallyrun: stopped by SIGTERM") == 3
    assert job.count(r"Root Cause|failed \(") == 0


def test_a_handler_runs_once_when_a_job_is_cancelled_and_stacks_are_shown(jobs: SlurmJobs) -> None:
    job = jobs.start("--nnodes=3", signals="SIGTERM", deaf=True)
    job.until_up(3)
    job.cancel()
    assert job.ends() == "CANCELLED"
    assert job.count("heard SIGTERM") == 3
    assert job.count("did not end within .* s; sending SIGKILL") == 3
    assert job.count('worker.py", line') == 3
    assert job.count("rallyrun: stopped by SIGTERM") == 3


def test_a_job_that_is_requeued_runs_again(jobs: SlurmJobs) -> None:
    job = jobs.start("--nnodes=3", signals="SIGTERM")
    job.until_up(3)
    jobs.cluster("scontrol", "requeue", job.number)
    job.until_said("rallyrun: stopped by SIGTERM", 3)
    job.until(lambda: job.state == "PENDING", "it waits")
    jobs.cluster("scontrol", "update", f"JobId={job.number}", "StartTime=now")
    job.until_up(3, run=1)
    assert job.count("heard SIGTERM") == 3
    jobs.finish()
    assert job.ends() == "COMPLETED"
    assert job.count(r"Root Cause|failed \(") == 0


def test_a_node_that_is_drained_has_not_failed(jobs: SlurmJobs) -> None:
    job = jobs.start("--nnodes=2:3", signals="SIGTERM")
    job.until_up(3)
    os.kill(jobs.cluster.pids("n3", "rallypoint.run")[0], signal.SIGTERM)
    job.until_said("this node left the job after SIGTERM; the job continues on 2 other nodes")
    job.until_up(2)
    jobs.finish()
    assert job.ends() == "COMPLETED"
    assert job.count("srun has ended with 0") == 1


def test_a_node_that_an_operator_drains_has_not_failed(jobs: SlurmJobs) -> None:
    """Without a secret; its workers report progress until they end, when it has left already."""
    job = jobs.start("--nnodes=2:3", signals="SIGTERM", slow=True)
    job.until_up(3)
    jobs.cluster(*RALLYCTL, f"--slurm={job.number}", "drain", "n3", env=jobs.env)
    job.until_said("this node was drained by .* and left the job; the job continues on 2 other nodes")
    job.until(lambda: job.count("of 2 in run 0: up") == 2, "the others continue")
    assert job.count("is closed: without a secret") == 0
    jobs.finish()
    assert job.ends() == "COMPLETED"
    assert job.count("srun has ended with 0") == 1


def test_a_node_that_is_lost_is_named(jobs: SlurmJobs) -> None:
    job = jobs.start("--nnodes=2:3", signals="SIGTERM")
    job.until_up(3)
    jobs.cluster.lose("n3")
    try:
        job.until_up(2)
        job.until_said(r"n3 \(rank 2\) was lost", 2)  # srun passes each stream of each node on by itself
        # Slurm itself takes half a minute to notice.
        jobs.cluster("scontrol", "update", "NodeName=n3", "State=DOWN", "Reason=lost")
        jobs.finish()
        assert job.ends() == "COMPLETED"
        assert job.count("Root Cause") == 0
        jobs.forget_temporary()
    finally:
        jobs.cluster.boot("n3")
        jobs.cluster.until_idle()


def test_commands_reach_a_job_from_the_login_node(jobs: SlurmJobs) -> None:
    job = jobs.start("--nnodes=3", signals="SIGTERM")
    job.until_up(3)

    def rallyctl(*words: str) -> str:
        command = (*RALLYCTL, f"--slurm={job.number}", *words)
        return jobs.cluster(*command, env=jobs.env)

    status = rallyctl("status")
    assert "running" in status
    assert all(name in status for name in ("n1", "n2", "n3"))
    rallyctl("restart")
    job.until(lambda: job.count("in run 0: up") == 6, "all workers are started again")
    jobs.finish()
    assert job.ends() == "COMPLETED"
