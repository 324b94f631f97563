"""`rallyctl --slurm=JOBID VERB`: runs the verb in its own step on the first node of a Slurm job.

There it finds the job as on any machine with an agent, and the job's ports need not be open to the login node.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from rallypoint.base.errors import UsageError, UserError

_JOB = re.compile(r"[0-9]+([_+][0-9]+)?")
"""A job, a task of an array, or a part of a heterogeneous job, in Slurm's notation."""
NAMED = "_RALLYPOINT_SLURM_JOB"
"""A variable of the verb in the step: its job has been named already, by the id of Slurm's job."""
_STEP = ("--overlap", "--nodes=1", "--ntasks=1", "--quiet")


def run_on_first_node(job: str, words: Sequence[str]) -> NoReturn:
    """Replace this process with `srun` and the same command.

    Args:
        job: the job's id.
        words: the arguments of `rallyctl`; the option itself is left out.

    Raises:
        UsageError: the id is not one of Slurm's.
        UserError: `srun` cannot be started.
    """
    if _JOB.fullmatch(job) is None:
        raise UsageError(f"--slurm={job}: give the id of a job of Slurm, as squeue shows it")
    command = ["srun", f"--jobid={job}", *_STEP, *(["--pty"] if sys.stdin.isatty() and sys.stdout.isatty() else [])]
    command += [sys.executable, "-m", "rallypoint.cli.rallyctl", *_without_option(words)]
    try:
        os.execvpe("srun", command, {**os.environ, NAMED: job})
    except OSError as error:
        raise UserError(f"--slurm={job}: srun cannot be started ({error.strerror}); run this on a login node") from None


def _without_option(words: Sequence[str]) -> list[str]:
    """The words without the option: the first word with its name (possibly shortened), as it precedes the verb."""
    at = next(index for index, word in enumerate(words) if word.startswith("--s"))
    return [*words[:at], *words[at + (1 if "=" in words[at] else 2) :]]
