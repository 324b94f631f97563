"""Jobs of several nodes under a real Slurm, and their output so far."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tests.environment import JOBS
from tests.jobs.launching import RALLYRUN
from tests.slurm.cluster import TIMEOUT, Slurm
from tests.waiting import until

WORKER = """
import os, signal, sys, time
from rallypoint import notices
me = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} in run {os.environ.get('SLURM_RESTART_COUNT', '0')}"
def say(what):
    os.write(1, f"{me}: {what}\\n".encode())
def hear(number, _):
    say("heard " + signal.Signals(number).name)
    if "slow" in sys.argv:
        time.sleep(2)
    if number == signal.SIGTERM and "deaf" not in sys.argv:
        os._exit(0)
for name in sys.argv[2].split(","):
    signal.signal(getattr(signal, name), hear)
say("up")
step = 0
while not os.path.exists(sys.argv[1] + "/finish"):
    time.sleep(0.02)
    notices.progress(step := step + 1)
say("done")
"""


class SlurmJob:
    """One batch job whose one step runs `rallyrun` on each node."""

    def __init__(self, cluster: Slurm, number: str, output: Path) -> None:
        self.number = number
        self._cluster = cluster
        self._output = output

    @property
    def lines(self) -> list[str]:
        """All that it has printed, each line with the number of the step's task before it."""
        return self._output.read_text().splitlines() if self._output.exists() else []

    def count(self, pattern: str) -> int:
        """In how many lines a pattern is found."""
        return sum(re.search(pattern, line) is not None for line in self.lines)

    def until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until something holds."""
        until(holds, lambda: "\n".join([what, *self.lines, self._cluster("squeue")]), TIMEOUT)

    def until_up(self, workers: int, run: int = 0) -> None:
        """Wait until so many workers of one world are up."""
        self.until(
            lambda: self.count(rf"of {workers} in run {run}: up") == workers, f"{workers} workers are up in run {run}"
        )

    def until_said(self, pattern: str, times: int = 1) -> None:
        """Wait until a pattern is found in so many lines."""
        self.until(lambda: self.count(pattern) >= times, f"{times} times {pattern!r}")

    def cancel(self, *how: str) -> None:
        """`scancel` with these arguments."""
        self._cluster("scancel", *how, self.number)

    def ends(self) -> str:
        """Wait for the end; returns Slurm's word for it."""
        self.until(lambda: self.state not in {"RUNNING", "PENDING", "COMPLETING", "CONFIGURING"}, "it has ended")
        return self.state

    @property
    def state(self) -> str:
        """Slurm's word for how it is."""
        (found,) = re.findall(r"JobState=(\w+)", self._cluster("scontrol", "show", "job", self.number))
        return str(found)


class SlurmJobs:
    """Starts jobs in a folder of the test's own."""

    def __init__(self, cluster: Slurm, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        (folder / "worker.py").write_text(WORKER)
        self._jobs: list[SlurmJob] = []

    def start(self, *flags: str, signals: str, deaf: bool = False, slow: bool = False) -> SlurmJob:
        """Start a job on all nodes, one worker each, which handle these signals; `deaf` ones stay after SIGTERM, `slow`
        ones take two seconds to end.
        """
        meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=n1:29400", "--rdzv-conf=last_call_timeout=50"]
        step = self.rallyrun(*meeting, *flags, signals=signals, deaf=deaf, slow=slow)
        return self.batch(
            "export PET_RDZV_ID=$SLURM_JOB_ID.$SLURM_RESTART_COUNT",
            f"srun --no-kill --label {step}",
            nodes=len(self.cluster.nodes),
        )

    def rallyrun(self, *flags: str, signals: str = "SIGTERM", deaf: bool = False, slow: bool = False) -> str:
        """The words that start `rallyrun` with the test's workers, for a shell: see `start`."""
        kinds = [word for word, is_one in (("deaf", deaf), ("slow", slow)) if is_one]
        return shlex.join([*RALLYRUN, *flags, "worker.py", str(self.folder), signals, *kinds])

    def batch(self, *lines: str, nodes: int, options: Sequence[str] = ()) -> SlurmJob:
        """Submit a batch script of these lines, with further options of `sbatch`; it says at its end how srun ended."""
        number = len(self._jobs)
        script, output = self.folder / f"job-{number}.sh", self.folder / f"output-{number}"
        script.write_text("\n".join(["#!/bin/sh", *lines, 'echo "srun has ended with $?"', ""]))
        several = (f"--nodes={nodes}", "--ntasks-per-node=1", "--no-kill", "--requeue", "--open-mode=append")
        return self.submit(script, output, *several, *options)

    def submit(self, script: Path, output: Path, *options: str, **env: str) -> SlurmJob:
        """Submit a batch script that is there, with options of `sbatch` and more in its environment."""
        where = (f"--chdir={self.folder}", f"--output={output}", "--parsable")
        number = self.cluster("sbatch", *where, *options, str(script), env={**self.env, **env}).strip()
        job = SlurmJob(self.cluster, number, output)
        self._jobs.append(job)
        return job

    @property
    def env(self) -> dict[str, str]:
        """What the test's jobs have in their environment."""
        return {"TMPDIR": str(self._temporary), JOBS: str(self._temporary), "OMP_NUM_THREADS": "1"}

    def finish(self) -> None:
        """Have the workers end with success."""
        (self.folder / "finish").touch()

    def kill(self, name: str, text: str, number: int) -> None:
        """Send a signal to the first process on a node whose command line has this text."""
        os.kill(self.cluster.pids(name, text)[0], number)

    def kill_step(self, name: str) -> None:
        """SIGKILL to all of a step on a node: its tasks, what those have started, and Slurm's process above them."""
        for pid in [*self.cluster.pids(name, "slurmstepd"), *self.cluster.pids(name, sys.executable)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def forget_temporary(self) -> None:
        """Take away what a node that was lost with all its processes has left."""
        shutil.rmtree(self._temporary)
        self._temporary.mkdir()

    def close(self) -> None:
        """End what runs, and check that nothing of it is left."""
        self.finish()
        for job in self._jobs:
            if job.state in {"RUNNING", "PENDING"}:
                job.cancel()
            job.ends()
        left = {name: pids for name in self.cluster.nodes if (pids := self._left(name))}
        assert not left, f"processes were left on the nodes: {left}"
        left_files = [each.name for each in self._temporary.iterdir() if each.name != f"rallypoint-{os.geteuid()}"]
        assert not left_files, "temporary files were left"

    def _left(self, name: str) -> list[int]:
        until(lambda: not self.cluster.pids(name, "worker.py"), f"no worker is left on {name}", TIMEOUT)
        return self.cluster.pids(name, "rallypoint")
