"""The exit codes of `--exit-codes=classified`, from which a scheduler knows whether to retry.

All agents of a job end with the same one: it follows from the job's verdict, or from what happened to all of them.
Imported only if a code or a verdict is requested.
"""

from __future__ import annotations

from signal import SIGTERM
from typing import NamedTuple

from rallypoint.base.errors import (
    JobPreempted,
    NodeLeftInOrder,
    PreflightError,
    ResourceError,
    SignalException,
    UserError,
)
from rallypoint.base.loop import LoopError
from rallypoint.etcd.api import EtcdError, EtcdPackageMissing, EtcdRefused
from rallypoint.failures.cause import Ending
from rallypoint.failures.report import ChildFailedError
from rallypoint.protocol.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from rallypoint.store.errors import StoreError

CODES = {
    Ending.PROGRAM: 1,
    Ending.CONFIGURATION: 2,
    Ending.INFRASTRUCTURE: 75,  # EX_TEMPFAIL of sysexits.h
    Ending.REPEATED: 93,
    Ending.HANG: 124,  # as of timeout(1)
    Ending.PREEMPTED: 143,  # 128 + SIGTERM
    Ending.STOPPED: 143,
}
"""The exit code of each ending."""

_SUCCESSES = (NodeLeftInOrder, RendezvousGracefulExitError)
_ENDINGS: tuple[tuple[type[BaseException], Ending], ...] = (
    (UserError, Ending.CONFIGURATION),
    (JobPreempted, Ending.PREEMPTED),
    (EtcdRefused, Ending.CONFIGURATION),
    (EtcdPackageMissing, Ending.CONFIGURATION),
    (EtcdError, Ending.INFRASTRUCTURE),
    (RendezvousTimeoutError, Ending.INFRASTRUCTURE),
    (RendezvousConnectionError, Ending.INFRASTRUCTURE),
    (RendezvousClosedError, Ending.CONFIGURATION),  # another job's id, or another node's rank
    (RendezvousStateError, Ending.CONFIGURATION),
    (StoreError, Ending.INFRASTRUCTURE),
    (PreflightError, Ending.INFRASTRUCTURE),
    (ResourceError, Ending.INFRASTRUCTURE),
    (LoopError, Ending.INFRASTRUCTURE),
)
"""The endings of errors that do not have one themselves; the first matching row counts, else it is the program."""


class Classified(NamedTuple):
    """The result of a run: `ending` is None for a success, and if a signal from a person ended it."""

    ending: Ending | None
    code: int


SUCCESS = Classified(None, 0)


def classified(error: BaseException | None) -> Classified:
    """Classify the end of a run for a scheduler.

    Args:
        error: what ended it; None for nothing.
    """
    if error is None or isinstance(error, _SUCCESSES):
        return SUCCESS
    if isinstance(error, KeyboardInterrupt):
        return Classified(None, 130)
    if isinstance(error, SignalException) and error.sigval != SIGTERM:
        return Classified(None, 128 + error.sigval)
    ending = ending_of(error)
    return Classified(ending, CODES[ending])


def ending_of(error: BaseException) -> Ending:
    """Why a run has not succeeded.

    SIGTERM means that the machine is taken away: saved work is kept, and without any, the job can be retried unchanged.
    """
    if isinstance(error, SignalException):
        return Ending.PREEMPTED if error.saved else Ending.INFRASTRUCTURE
    if isinstance(error, ChildFailedError):
        return Ending(error.ending) if error.ending else Ending.PROGRAM
    if isinstance(error, RendezvousClosedError) and error.ending is not None:
        return error.ending
    return next((ending for kind, ending in _ENDINGS if isinstance(error, kind)), Ending.PROGRAM)
