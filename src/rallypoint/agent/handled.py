"""The signals that an agent handles (contract section 5.6)."""

from __future__ import annotations

import os
import signal

from rallypoint.base.signals import signal_number

SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


def handled_signals() -> list[int]:
    """The signals that this agent handles; a name that is none was warned of by the command line.

    Whoever started us with SIGHUP ignored (`nohup`) meant that, unless the user has named others than the usual. Of
    SIGINT and SIGQUIT that does not follow: a shell's script ignores them for all that it starts in the background.
    """
    names = os.environ.get(SIGNALS_VARIABLE, DEFAULT_SIGNALS)
    numbers: list[int] = [number for number in map(signal_number, names.split(",")) if number is not None]
    if names != DEFAULT_SIGNALS:
        return numbers
    return [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
