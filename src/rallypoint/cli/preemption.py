"""Checks the conditions of `--preempt-signals`, `--stop-before-end` and `--requeue`, before anything else."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from shutil import which

from rallypoint.agent.features.preemption import end_time, job_name, preempt_signals
from rallypoint.base.errors import UsageError
from rallypoint.base.log import get_logger
from rallypoint.base.signals import signal_name, signal_number
from rallypoint.cli.parse import Options, naming

_log = get_logger(__name__)


def check_preemption(options: Options, environ: Mapping[str, str]) -> None:
    """Check the values, and warn of what will not work here.

    Raises:
        UsageError: a value cannot work.
    """
    _check_signals(options)
    _check_deadline(options, environ)
    _check_requeue(options, environ)


def _check_signals(options: Options) -> None:
    source = options.source("preempt_signals")
    with naming(f"{source}={options.preempt_signals}"):
        numbers = preempt_signals(options.preempt_signals)
    handled = {signal_number(name) for name in options.signals_to_handle.split(",")}
    for number in sorted(numbers & handled):
        raise UsageError(
            f"{signal_name(number)} is named by {source} and by "
            f"{options.source('signals_to_handle')}={options.signals_to_handle}; leave it out of one of them"
        )


def _check_deadline(options: Options, environ: Mapping[str, str]) -> None:
    seconds = options.stop_before_end
    given = f"{options.source('stop_before_end')}={seconds:g}"
    if not 0 <= seconds < math.inf:
        raise UsageError(f"{given} is out of range; give seconds from 0 on")
    now = time.time()
    end = end_time(environ, now) if seconds else None
    if end is not None and now < end <= now + seconds:
        raise UsageError(f"{given} is no less than the {end - now:.0f} s that this job has left; give less")


def _check_requeue(options: Options, environ: Mapping[str, str]) -> None:
    given = f"{options.source('requeue')}={options.requeue}"
    if options.requeue < 0:
        raise UsageError(f"{given} is out of range; give 0 or more")
    if not options.requeue:
        return
    if not (options.preempt_signals or options.stop_before_end):
        raise UsageError(f"{given} is for a job that is preempted; give --preempt-signals or --stop-before-end too")
    job = job_name(environ)
    if not job:
        raise UsageError(f"{given} requeues a job of Slurm, and this is none: SLURM_JOB_ID is not set; leave it out")
    if environ.get("ENVIRONMENT") != "BATCH":
        _log.warning("%s: Slurm requeues batch jobs only, and this seems to be none; start it by sbatch", given)
    if which("scontrol", path=environ.get("PATH")) is None:
        _log.warning(
            "%s: scontrol is not on the PATH, so that nobody can be asked to requeue job %s; have it in the container, "
            "or let the batch script run 'scontrol requeue %s' when srun has ended with 143",
            given,
            job,
            job,
        )
