"""The requeue of a job of Slurm.

The job is put into the queue again by the one node that the verdict names, beside the stop of its workers. Once it is
requeued, Slurm ends the job's step; and `srun --kill-on-bad-exit` does so when the first of the other nodes has ended
with the code of a preempted job. So the request must not die of the SIGTERM that all processes of the step are sent
then: it is blocked in `scontrol`, and the agent passes nothing on to it.
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
"""Seconds that `scontrol` may take, beside the stop of the workers; it takes a hundredth of one, unless the controller
of the cluster is away."""
REQUEST = """case "$(squeue --noheader --jobs="$1" --format=%T 2>/dev/null)" in
COMPLETING*) echo "it is ending already, cancelled or requeued by somebody else"; exit 1 ;;
esac
exec scontrol requeue "$1"
"""
"""`scontrol` would bring back a job that was cancelled a moment ago."""


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
        self._request: SchedulerCommand | None = None
        used = times_requeued(environ)
        self._count = f"{used + 1} of {limit}"
        self._failure = ""
        if used >= limit:
            self._failure = f"Slurm job {self._job} is not requeued: --requeue={limit} allows that no more often"
            return
        log.warning("requeueing Slurm job %s (%s)", self._job, self._count)
        try:
            self._request = SchedulerCommand(["sh", "-c", REQUEST, "sh", self._job], os.environ)
        except OSError as error:
            self._failed(f"it could not be asked for: {error.strerror}")

    def finish(self) -> str:
        """Wait for the answer, and say in words what it is."""
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
