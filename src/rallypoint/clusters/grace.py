"""Schedulers' grace periods: seconds between SIGTERM to all processes of a job and SIGKILL.

Slurm         KillWait of its slurm.conf if readable, otherwise its default of 30
Kubernetes    30, the default of terminationGracePeriodSeconds, which no pod can look up
PBS           10, the default of a queue's kill_delay
              https://github.com/openpbs/openpbs/blob/master/doc/man1/pbs_queue_attributes.7B
LSF           10, the default of JOB_TERMINATE_INTERVAL
              https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=lsbparams-job-terminate-interval
SageMaker     120: https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_StopTrainingJob.html
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_DEFAULT = 30.0
"""Default of Slurm's KillWait and Kubernetes' terminationGracePeriodSeconds."""
_OTHERS = {"TRAINING_JOB_NAME": 120.0, "PBS_JOBID": 10.0, "LSB_JOBID": 10.0}
_SLURM_CONFS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")
"""Paths of slurm.conf if `SLURM_CONF` is not set: the usual one, and that of a node without its own file."""


def scheduler_grace_period(environ: Mapping[str, str]) -> float:
    """The grace period, known or assumed, of the scheduler that started this process."""
    if environ.get("SLURM_JOB_ID"):
        return _slurm_kill_wait(environ)
    return next((seconds for name, seconds in _OTHERS.items() if environ.get(name)), _DEFAULT)


def _slurm_kill_wait(environ: Mapping[str, str]) -> float:
    for path in filter(None, (environ.get("SLURM_CONF"), *_SLURM_CONFS)):
        try:
            with open(path, encoding="utf-8", errors="replace") as lines:
                return kill_wait(lines)
        except OSError:
            continue
    return _DEFAULT


def kill_wait(lines: Iterable[str]) -> float:
    """The value of `KillWait` in a slurm.conf, in seconds; Slurm's default if missing."""
    for line in lines:
        name, _, value = line.partition("#")[0].partition("=")
        if name.strip().lower() == "killwait" and value.strip().isdecimal():
            return max(1.0, float(value))
    return _DEFAULT
