"""The exit codes of `--exit-codes=classified`, by which a scheduler knows whether to try again.

All agents of a job end with the same one: what decides is the job's verdict, or what happened to all of them. Imported
only where a code or a verdict is asked for.
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
"""What each ending is as an exit code."""

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
"""What an error means that does not say so itself; the first row that fits counts, and the program where none does."""


class Classified(NamedTuple):
    """How a run has ended: `ending` is None for a success, and where a signal of a person's ended it."""

    ending: Ending | None
    code: int


SUCCESS = Classified(None, 0)


def classified(error: BaseException | None) -> Classified:
    """What the end of a run is to a scheduler.

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

    SIGTERM takes the machine away: what was saved is kept, and if nothing was, the job can be tried again as it is.
    """
    if isinstance(error, SignalException):
        return Ending.PREEMPTED if error.saved else Ending.INFRASTRUCTURE
    if isinstance(error, ChildFailedError):
        return Ending(error.ending) if error.ending else Ending.PROGRAM
    if isinstance(error, RendezvousClosedError) and error.ending is not None:
        return error.ending
    return next((ending for kind, ending in _ENDINGS if isinstance(error, kind)), Ending.PROGRAM)
