"""A Slurm job that was preempted is put into the queue again, by the one node that the verdict names.

    begin      as soon as the verdict is known, while the workers are stopped
    finish     before this agent ends: says in words what came of it

Once it is requeued, Slurm ends the job's step; and `srun --kill-on-bad-exit` does so when the first of the other nodes
has ended with the code of a preempted job. So the request must not die of the SIGTERM that all processes of the step
are sent then: it is blocked in `scontrol`, and the agent passes nothing on to it.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping

from rallypoint.base.log import get_logger

log = get_logger(__name__)

_TIMEOUT = 20.0
"""Seconds that `scontrol` may take, beside the stop of the workers; it takes a hundredth of one, unless the controller
of the cluster is away."""
REQUEST = """case "$(squeue --noheader --jobs="$1" --format=%T 2>/dev/null)" in
COMPLETING*) echo "it is ending already, cancelled or requeued by somebody else"; exit 1 ;;
esac
exec scontrol requeue "$1"
"""
"""`scontrol` would bring back a job that was cancelled a moment ago."""
_UNTIL_REQUEUED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCONT}


def job_name(environ: Mapping[str, str]) -> str:
    """What `scontrol` calls the Slurm job of this process: its number, or array and task."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID", "")


def times_requeued(environ: Mapping[str, str]) -> int:
    """How often Slurm has started the job again, for whatever reason."""
    text = environ.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdecimal() and text.isascii() else 0


class SlurmRequeue:
    """One request to Slurm, which is under way from the beginning. Nothing waits but `finish`.

    Args:
        limit: how often the job may be requeued.
        environ: of this process, by which the job is known.
    """

    def __init__(self, limit: int, environ: Mapping[str, str]) -> None:
        self._job = job_name(environ)
        self._process: subprocess.Popen[str] | None = None
        used = times_requeued(environ)
        self._count = f"{used + 1} of {limit}"
        self._failure = ""
        if used >= limit:
            self._failure = f"Slurm job {self._job} is not requeued: --requeue={limit} allows that no more often"
            return
        log.warning("requeueing Slurm job %s (%s)", self._job, self._count)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _UNTIL_REQUEUED)
        try:
            self._process = subprocess.Popen(
                ["sh", "-c", REQUEST, "sh", self._job],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            self._failed(f"it could not be asked for: {error.strerror}")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def finish(self) -> str:
        """Wait for the answer, and say in words what it is."""
        process, self._process = self._process, None
        if process is not None:
            try:
                said, _ = process.communicate(timeout=_TIMEOUT)
                if process.returncode:
                    lines = said.strip().splitlines() or [f"it ended with exit code {process.returncode}"]
                    self._failed(lines[-1].strip())
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                self._failed(f"scontrol did not answer within {_TIMEOUT:g} s")
        return self._failure or f"Slurm job {self._job} is requeued ({self._count})"

    def _failed(self, why: str) -> None:
        self._failure = f"Slurm job {self._job} is not requeued: {why}; run 'scontrol requeue {self._job}' yourself"
