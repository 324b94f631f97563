"""The batch scripts of `deploy/slurm`, run unchanged by a real Slurm; for containers, as far as Slurm reads them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.jobs import SlurmJob, SlurmJobs
from tests.slurm.test_preemption import TRAINER

FOLDER = Path(__file__).parents[2] / "deploy" / "slurm"
SCRIPTS = sorted(FOLDER.glob("*.sbatch"))


def submit(jobs: SlurmJobs, name: str) -> SlurmJob:
    (jobs.folder / "train_ddp.py").write_text(TRAINER)
    return jobs.submit(FOLDER / name, jobs.folder / "output", VENV=str(Path(sys.executable).parents[1]))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_slurm_and_the_shell_accept_each_script(jobs: SlurmJobs, script: Path) -> None:
    jobs.cluster("sbatch", "--test-only", str(script))
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)


def test_the_plain_job_trains_and_ends(jobs: SlurmJobs) -> None:
    job = submit(jobs, "plain.sbatch")
    job.until_said("of 4, run 0: begins at step 0", 4)
    jobs.finish()
    assert job.ends() == "COMPLETED"
    assert job.count("done$") == 4


def test_the_job_that_is_to_be_requeued_resumes_where_it_saved(jobs: SlurmJobs) -> None:
    job = submit(jobs, "requeue.sbatch")
    job.until_said("of 4, run 0: begins at step 0", 4)
    job.cancel("--signal=USR2")
    job.until(lambda: job.state == "PENDING", "it waits in the queue")
    assert job.count(r"is requeued \(1 of 10\)") == 1
    jobs.cluster("scontrol", "update", f"JobId={job.number}", "StartTime=now")
    for rank in range(4):
        step = (jobs.folder / f"step-{rank}").read_text()
        job.until_said(f"rank {rank} of 4, run 1: begins at step {step}$")
    jobs.finish()
    assert job.ends() == "COMPLETED"
