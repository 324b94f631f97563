"""A job that Slurm takes away saves, is requeued, and resumes from its save."""

from __future__ import annotations

import shlex

import pytest

from rallypoint.features.preemption.slurm import REQUEST
from tests.jobs.launching import RALLYRUN
from tests.slurm.jobs import SlurmJob, SlurmJobs

TRAINER = """
import os, signal, time
from rallypoint import notices
rank, path, run = os.environ["RANK"], "step-" + os.environ["RANK"], os.environ.get("SLURM_RESTART_COUNT", "0")
step = int(open(path).read()) if os.path.exists(path) else 0
def say(what):
    os.write(1, f"rank {rank} of {os.environ['WORLD_SIZE']}, run {run}: {what}\\n".encode())
def stay(*_):
    while not os.path.exists("finish"):
        time.sleep(0.02)
    os._exit(0)
if os.path.exists("slow"):
    signal.signal(signal.SIGTERM, stay)
say(f"begins at step {step}")
while not os.path.exists("finish"):
    time.sleep(0.02)
    step += 1
    if notices.pending() is not None and not os.path.exists("slow"):
        with notices.saving():
            open(path, "w").write(str(step))
        say(f"saved step {step}")
        notices.acknowledge()
        time.sleep(1000)
say("done")
"""


def train(jobs: SlurmJobs, *flags: str, options: tuple[str, ...] = (), srun: str = "") -> SlurmJob:
    """A job of two nodes that resumes."""
    (jobs.folder / "train.py").write_text(TRAINER)
    words = [*RALLYRUN, "--cluster=auto", "--nproc-per-node=1", *flags, "train.py"]
    return jobs.batch(f"srun --label {srun} {shlex.join(words)}", nodes=2, options=options)


def saved(jobs: SlurmJobs, rank: int) -> int:
    return int((jobs.folder / f"step-{rank}").read_text())


def until_it_waits(job: SlurmJob) -> None:
    job.until(lambda: job.state == "PENDING", "it waits in the queue")
    assert job.count(r"Root Cause|failed \(|Traceback") == 0


def test_a_signal_has_all_save_and_the_job_requeued_and_it_resumes_there(jobs: SlurmJobs) -> None:
    job = train(jobs, "--preempt-signals=SIGUSR2", "--requeue=1", srun="--kill-on-bad-exit")
    job.until_said("of 2, run 0: begins at step 0", 2)
    job.cancel("--signal=USR2")
    until_it_waits(job)
    assert job.count("run 0: saved step") == 2
    assert (
        job.count("rallyrun: the job was preempted, since .* received SIGUSR2; all workers of this node have saved")
        == 2
    )
    assert job.count(f"Slurm job {job.number} is requeued \\(1 of 1\\)") == 1, "one agent has done it"
    jobs.cluster("scontrol", "update", f"JobId={job.number}", "StartTime=now")
    job.until_said("run 1: begins", 2)
    for rank in range(2):
        assert job.count(f"rank {rank} of 2, run 1: begins at step {saved(jobs, rank)}$") == 1
    job.cancel("--signal=USR2")
    assert job.ends() == "COMPLETED"
    assert job.count("run 1: saved step") == 2
    assert job.count("is not requeued: it has reached --requeue=1") == 1
    assert job.count("srun has ended with 143") == 1, "the batch script can go by that"


def test_the_time_limit_is_forestalled(jobs: SlurmJobs) -> None:
    job = train(jobs, "--stop-before-end=55", "--requeue=3", "--shutdown-timeout=5", options=("--time=1",))
    job.until_said("run 0: saved step", 2)
    assert job.count(r"reports that Slurm job \d+ ends in 5\d s: the job is being preempted; the workers have 4\d") == 2
    until_it_waits(job)
    assert job.count(r"is requeued \(1 of 3\)") == 1


def test_a_job_that_is_cancelled_while_it_saves_is_not_brought_back(jobs: SlurmJobs) -> None:
    (jobs.folder / "slow").touch()
    job = train(jobs, "--preempt-signals=SIGUSR2", "--requeue=3")
    job.until_said("run 0: begins", 2)
    job.cancel("--signal=USR2")
    job.until_said("the workers have 60 s to save and acknowledge", 2)
    job.cancel()
    job.until_said("Received SIGTERM before the end of the preempted job was announced", 2)
    with pytest.raises(AssertionError, match="it is ending already"):
        jobs.cluster("sh", "-c", REQUEST, "sh", job.number)
    jobs.finish()
    assert job.ends() == "CANCELLED"
    assert job.count("requeue") == 0
