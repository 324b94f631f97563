"""`rallyctl --slurm=JOBID VERB`: runs the verb in its own step on the first node of a Slurm job.

On that node it finds the job as usual, and the job's ports do not have to be open to the login node.
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
"""Set in the step, where the verb does not need the job's name: Slurm's job id has already selected it."""
_STEP = ("--overlap", "--nodes=1", "--ntasks=1", "--quiet")


def run_on_first_node(job: str, words: Sequence[str]) -> NoReturn:
    """Replace this process with `srun` and the same command.

    Args:
        job: the job's id.
        words: the arguments of `rallyctl`, including the option, which is removed.

    Raises:
        UsageError: the id is not valid in Slurm.
        UserError: `srun` cannot be started.
    """
    if _JOB.fullmatch(job) is None:
        raise UsageError(f"--slurm={job} is not a Slurm job id; use one that squeue shows")
    command = ["srun", f"--jobid={job}", *_STEP, *(["--pty"] if sys.stdin.isatty() and sys.stdout.isatty() else [])]
    command += [sys.executable, "-m", "rallypoint.cli.rallyctl", *_without_option(words)]
    try:
        os.execvpe("srun", command, {**os.environ, NAMED: job})
    except OSError as error:
        raise UserError(f"--slurm={job}: srun cannot be started ({error.strerror}); run this on a login node") from None


def _without_option(words: Sequence[str]) -> list[str]:
    """Remove the option: the first word with its name, which may be shortened, since it precedes the verb."""
    at = next(index for index, word in enumerate(words) if word.startswith("--s"))
    return [*words[:at], *words[at + (1 if "=" in words[at] else 2) :]]
