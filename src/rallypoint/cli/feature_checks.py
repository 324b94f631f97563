"""Checks of the options beyond torchrun that a reader of one value cannot make, before anything else is done.

Imported only if there are any.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from shutil import which

from rallypoint.agent.features.preemption import end_time, job_name
from rallypoint.agent.options import Features, Preemption
from rallypoint.base.errors import UsageError, UserError
from rallypoint.base.log import get_logger
from rallypoint.base.signals import signal_name, signal_number
from rallypoint.cli.parse import Options, naming

_log = get_logger(__name__)


def checked(options: Options, environ: Mapping[str, str]) -> Features:
    """Check the values, and warn of what will not work here. Returns them with absolute paths.

    Raises:
        UserError: a value cannot work.
    """
    own = options.features
    if own.preemption.wanted or own.preemption.requeue:
        _check_signals(options, own.preemption)
        _check_deadline(options, own.preemption, environ)
        _check_requeue(options, own.preemption, environ)
    if own.hangs.on_hang != "report" and not own.hangs.hang_timeout:
        _log.warning("%s=%s does nothing without --hang-timeout", options.source("on_hang"), own.hangs.on_hang)
    return own._replace(
        recovery=own.recovery._replace(progress_file=_progress_file(options)),
        output=own.output._replace(incident_dir=_incident_dir(options)),
    )


def _check_signals(options: Options, asked: Preemption) -> None:
    source = options.source("preempt_signals")
    with naming(f"{source}={asked.preempt_signals}"):
        numbers = asked.signals
    handled = {signal_number(name) for name in options.signals_to_handle.split(",")}
    for number in sorted(numbers & handled):
        raise UsageError(
            f"{signal_name(number)} is named by {source} and by "
            f"{options.source('signals_to_handle')}={options.signals_to_handle}; leave it out of one of them"
        )


def _check_deadline(options: Options, asked: Preemption, environ: Mapping[str, str]) -> None:
    seconds = asked.stop_before_end
    given = f"{options.source('stop_before_end')}={seconds:g}"
    if not 0 <= seconds < math.inf:
        raise UsageError(f"{given} is out of range; give seconds from 0 on")
    now = time.time()
    end = end_time(environ, now) if seconds else None
    if end is not None and now < end <= now + seconds:
        raise UsageError(f"{given} is no less than the {end - now:.0f} s that this job has left; give less")


def _check_requeue(options: Options, asked: Preemption, environ: Mapping[str, str]) -> None:
    given = f"{options.source('requeue')}={asked.requeue}"
    if asked.requeue < 0:
        raise UsageError(f"{given} is out of range; give 0 or more")
    if not asked.requeue:
        return
    if not asked.wanted:
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


def _progress_file(options: Options) -> str:
    path = options.features.recovery.progress_file
    if path and (os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or ".")):
        raise UserError(
            f"{options.source('progress_file')}={path} cannot be a file that workers write: "
            f"{'it is a folder' if os.path.isdir(path) else 'there is no such folder'}; name a file in a folder that "
            "is there"
        )
    return os.path.abspath(path) if path else ""


def _incident_dir(options: Options) -> str:
    """The folder, made now, so that a failure to make it shows before it is needed."""
    path = options.features.output.incident_dir
    try:
        if path:
            os.makedirs(path, exist_ok=True)
        if not path or os.access(path, os.W_OK | os.X_OK):
            return os.path.abspath(path) if path else ""
        why = "it cannot be written to"
    except OSError as error:
        why = error.strerror or str(error)
    source = options.source("incident_dir")
    raise UsageError(f"{source}={path} cannot be a folder for incidents: {why}; name a folder of your own")
