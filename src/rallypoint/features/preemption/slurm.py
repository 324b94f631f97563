"""Requeues a Slurm job.

The node named in the verdict requeues the job while it stops its workers. Slurm ends the job's step after a requeue;
`srun --kill-on-bad-exit` ends it when the first other node exits with a preempted job's code. All processes of the step
then get SIGTERM, which must not kill the request: `scontrol` runs with the signal blocked, and the agent does not
forward it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from rallypoint.base.log import get_logger
from rallypoint.base.signals import how_it_ended
from rallypoint.features.preemption.commands import SchedulerCommand
from rallypoint.features.preemption.limits import job_name

log = get_logger(__name__)

_REQUEUE_TIMEOUT = 20.0
"""Seconds for `scontrol`, which runs while the workers stop; it takes a hundredth of a second unless the cluster's
controller is away."""
REQUEST = """case "$(squeue --noheader --jobs="$1" --format=%T 2>/dev/null)" in
COMPLETING*) echo "it is ending already, cancelled or requeued by somebody else"; exit 1 ;;
esac
exec scontrol requeue "$1"
"""
"""Checks the state first: `scontrol` would revive a job that was just cancelled."""


def times_requeued(environ: Mapping[str, str]) -> int:
    """How often Slurm restarted the job, for any reason."""
    text = environ.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdecimal() and text.isascii() else 0


class SlurmRequeue:
    """One request to Slurm, which starts at once. Only `finish` waits.

    Args:
        limit: how often the job may be requeued.
        environ: this process's environment, which identifies the job.
    """

    def __init__(self, limit: int, environ: Mapping[str, str]) -> None:
        self._job = job_name(environ)
        self._request: SchedulerCommand | None = None
        used = times_requeued(environ)
        self._count = f"{used + 1} of {limit}"
        self._failure = ""
        if used >= limit:
            self._failure = f"Slurm job {self._job} is not requeued: it has reached --requeue={limit}"
            return
        log.warning("requeueing Slurm job %s (%s)", self._job, self._count)
        try:
            self._request = SchedulerCommand(["sh", "-c", REQUEST, "sh", self._job], os.environ)
        except OSError as error:
            self._failed(f"the request failed: {error.strerror}")

    def finish(self) -> str:
        """Wait for the answer, and describe it."""
        request, self._request = self._request, None
        if request is not None:
            code, lines = request.answer(_REQUEUE_TIMEOUT)
            if code is None:
                self._failed(f"scontrol did not answer within {_REQUEUE_TIMEOUT:g} s")
            elif code:
                self._failed((lines or [f"it {how_it_ended(code)}"])[-1])
        return self._failure or f"Slurm job {self._job} is requeued ({self._count})"

    def _failed(self, why: str) -> None:
        self._failure = f"Slurm job {self._job} is not requeued: {why}; run 'scontrol requeue {self._job}' yourself"
