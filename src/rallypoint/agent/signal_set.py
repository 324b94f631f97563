"""The signals that an agent handles (contract section 5.6), and what schedulers make of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

from rallypoint.base.signals import signal_number

SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"

FORWARDED_SIGNALS = frozenset(
    {signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH, signal.SIGURG, signal.SIGIO}
)
"""Signals that inform workers and end nobody."""

SCHEDULERS = {"SLURM_JOB_ID": "Slurm", "PBS_JOBID": "PBS", "LSB_JOBID": "LSF"}
"""By which variable a scheduler is known that sends signals as notices, to the agent or to all processes of a job."""
_SCHEDULER_NOTICE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


def scheduler(environ: Mapping[str, str]) -> str | None:
    """The name of the scheduler that has started this process; None if it is none that sends signals as notices."""
    return next((name for variable, name in SCHEDULERS.items() if environ.get(variable)), None)


def handled_signals() -> list[int]:
    """The signals that this agent handles; a name that is none was warned of by the command line.

    Whoever started us with SIGHUP ignored (`nohup`) meant that, unless the user has named others than the usual. Of
    SIGINT and SIGQUIT that does not follow: a shell's script ignores them for all that it starts in the background.
    Under a scheduler, SIGUSR1 and SIGUSR2 belong to the usual ones, as far as this process has no other use for them.
    """
    names = os.environ.get(SIGNALS_VARIABLE, DEFAULT_SIGNALS)
    numbers: list[int] = [number for number in map(signal_number, names.split(",")) if number is not None]
    if names != DEFAULT_SIGNALS:
        return numbers
    if scheduler(os.environ) is not None:
        numbers += [number for number in _SCHEDULER_NOTICE_SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    return [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
