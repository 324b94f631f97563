"""Schedulers that know when the job's time limit ends, and their answers.

    Slurm    squeue --format=%e, in epoch seconds (`SLURM_TIME_FORMAT`), or NONE
    Flux     flux job timeleft: seconds; 4294967295 without a limit
             https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man1/flux-job.html
    PBS      qstat -f: the start (stime) and the walltime of the Resource_List, or TORQUE's Walltime.Remaining
             https://github.com/openpbs/openpbs/blob/master/doc/man1/pbs_job_attributes.7B
    LSF      bjobs -o time_left: "HOURS:MINUTES L"; E and X stand for estimates, which end no job
             https://www.ibm.com/docs/en/SSWRJV_10.1.0/lsf_command_ref/bjobs.__w__l.1.html

All but Slurm's are based on documentation, and were never run. A scheduler's output is foreign text.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence

from rallypoint.base.light_typing import NamedTuple

_LONGEST = 10 * 366 * 86400.0
"""Seconds from now; a job end later than this is not believed."""


class Scheduler(NamedTuple):
    """A scheduler: the name of its job, the command and variables for the query, and the reader of the answer, which
    returns epoch seconds, infinity without a limit, or None if unknown. `instead` is another way to get a signal before
    the end."""

    title: str
    job: Callable[[Mapping[str, str]], str]
    command: Callable[[str], list[str]]
    read: Callable[[Sequence[str], float], float | None]
    instead: str
    variables: Mapping[str, str] = {}


def job_name(environ: Mapping[str, str]) -> str:
    """This process's job in Slurm's commands: its number, or array and task; empty for none.

    A task's number might be that of its whole array.
    """
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID", "")


def _flux_job(environ: Mapping[str, str]) -> str:
    name = environ.get("FLUX_JOB_ID", "").replace("\u0192", "f")
    return name if re.fullmatch(r"f[0-9A-Za-z]{1,16}", name, re.ASCII) else ""


def _pbs_job(environ: Mapping[str, str]) -> str:
    name = environ.get("PBS_JOBID", "").strip()
    return name if re.fullmatch(r"[0-9]{1,10}(\[[0-9]{0,10}\])?(\.[\w.-]{1,255})?", name, re.ASCII) else ""


def _lsf_job(environ: Mapping[str, str]) -> str:
    job, part = environ.get("LSB_JOBID", ""), environ.get("LSB_JOBINDEX", "")
    if not re.fullmatch(r"[0-9]{1,10}", job, re.ASCII):
        return ""
    return f"{job}[{part}]" if re.fullmatch(r"[1-9][0-9]{0,9}", part, re.ASCII) else job


def moment(text: str, now: float) -> float | None:
    """Parse epoch seconds; None if malformed or impossible.

    Args:
        text: the text of a variable or an answer.
        now: the current time in epoch seconds.
    """
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        return None
    return _near(float(text), now)


def _near(when: float, now: float) -> float | None:
    return when if abs(when - now) < _LONGEST else None


def _read_squeue(lines: Sequence[str], now: float) -> float | None:
    found = (when for line in lines if (when := moment(line, now)) is not None)
    return next(found, math.inf if lines and lines[-1] == "NONE" else None)


def _read_timeleft(lines: Sequence[str], now: float) -> float | None:
    text = lines[-1] if lines else ""
    if not re.fullmatch(r"[0-9]{1,10}", text, re.ASCII):
        return None
    return math.inf if int(text) == 0xFFFFFFFF else _near(now + int(text), now)


def _read_qstat(lines: Sequence[str], now: float) -> float | None:
    values = dict(line.split(" = ", 1) for line in lines if " = " in line)
    remaining = values.get("Walltime.Remaining", "")
    if re.fullmatch(r"[0-9]{1,9}", remaining, re.ASCII):
        return _near(now + int(remaining), now)
    if "job_state" in values and "Resource_List.walltime" not in values:
        return math.inf
    walltime = re.fullmatch(
        r"(?:(?:([0-9]{1,6}):)?([0-9]{1,6}):)?([0-9]{1,9})", values.get("Resource_List.walltime", ""), re.ASCII
    )
    try:
        began = time.mktime(time.strptime(values.get("stime", ""), "%a %b %d %H:%M:%S %Y"))
    except (ValueError, OverflowError):
        return None
    if walltime is None:
        return None
    hours, minutes, seconds = (int(part or 0) for part in walltime.groups())
    return _near(began + hours * 3600 + minutes * 60 + seconds, now)


def _read_bjobs(lines: Sequence[str], now: float) -> float | None:
    text = lines[-1] if lines else ""
    if text == "-":
        return math.inf
    match = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,2})(?::([0-9]{1,2}))? +L", text, re.ASCII)
    if match is None:
        return None
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return _near(now + hours * 3600 + minutes * 60 + seconds, now)


SCHEDULERS = (
    Scheduler(  # before Slurm and LSF, of which a Flux instance can be a job
        "Flux",
        _flux_job,
        lambda job: ["flux", "job", "timeleft", job],
        _read_timeleft,
        "'flux run --signal=USR2@SECONDS'",
    ),
    Scheduler(
        "Slurm",
        job_name,
        lambda job: ["squeue", "--noheader", f"--jobs={job}", "--format=%e"],
        _read_squeue,
        "'sbatch --signal'",
        {"SLURM_TIME_FORMAT": "%s"},
    ),
    Scheduler("PBS", _pbs_job, lambda job: ["qstat", "-f", job], _read_qstat, "a signal of the job's script"),
    Scheduler(
        "LSF",
        _lsf_job,
        lambda job: ["bjobs", "-noheader", "-o", "time_left", job],
        _read_bjobs,
        "'bsub -wa USR2 -wt MINUTES'",
    ),
)


def scheduler_of(environ: Mapping[str, str]) -> Scheduler | None:
    """The scheduler that started this process, if it can be queried."""
    return next((scheduler for scheduler in SCHEDULERS if scheduler.job(environ)), None)


_REQUEUED_BY = {
    "LSF": "one of LSF; remove the flag, and submit with bsub -Q 143, so that LSF requeues a preempted job",
    "PBS": "one of PBS, where only an operator may requeue a job; remove the flag, and let the script submit itself "
    "again if it exits with code 143",
}


def why_no_requeue(environ: Mapping[str, str]) -> str:
    """Explain that this is not a Slurm job, with an alternative to `--requeue`."""
    scheduler = scheduler_of(environ)
    title = "" if scheduler is None else scheduler.title
    instead = _REQUEUED_BY.get(title, "not one: SLURM_JOB_ID is not set; remove the flag")
    return f"requeues a Slurm job, but this is {instead}"
