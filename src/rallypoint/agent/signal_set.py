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
"""Signals that inform workers and do not end them."""

SCHEDULERS = {"SLURM_JOB_ID": "Slurm", "PBS_JOBID": "PBS", "LSB_JOBID": "LSF"}
"""Variables that identify schedulers which send signals as notices, to the agent or to all processes of a job."""
_SCHEDULER_NOTICE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


def scheduler(environ: Mapping[str, str]) -> str | None:
    """The name of the scheduler that has started this process; None if it does not send signals as notices."""
    return next((name for variable, name in SCHEDULERS.items() if environ.get(variable)), None)


def handled_signals() -> list[int]:
    """The signals that this agent handles; the command line has warned of unknown names.

    If this process was started with SIGHUP ignored (`nohup`), it stays ignored, unless the user has named other signals
    than the default. This does not apply to SIGINT and SIGQUIT: a shell script ignores them for everything that it
    starts in the background. Under a scheduler, SIGUSR1 and SIGUSR2 belong to the default, unless this process uses
    them otherwise.
    """
    names = os.environ.get(SIGNALS_VARIABLE, DEFAULT_SIGNALS)
    numbers: list[int] = [number for number in map(signal_number, names.split(",")) if number is not None]
    if names != DEFAULT_SIGNALS:
        return numbers
    if scheduler(os.environ) is not None:
        numbers += [number for number in _SCHEDULER_NOTICE_SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    return [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
