"""The result of a run for other programs: an exit code, a JSON file, and the termination message of Kubernetes.

The exit codes of `--exit-codes=classified` tell a scheduler whether to retry. All agents of a job exit with the same
code, which follows from the job's verdict or from an event that reached all of them.

The file in `RALLYPOINT_VERDICT_FILE` is written completely or not at all. Unless the run succeeded, the same contents,
as one line of at most 4,096 bytes, go to `/dev/termination-log` if that is writable. Pods with another
`terminationMessagePath` set it in `RALLYPOINT_TERMINATION_LOG`.

Imported only if a code or a verdict is requested.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from signal import SIGTERM
from typing import Any, NamedTuple

from rallypoint.base.errors import (
    JobPreempted,
    NodeLeftInOrder,
    PreflightError,
    ResourceError,
    SignalException,
    UserError,
)
from rallypoint.base.kernel import DeniedError
from rallypoint.base.log import get_logger
from rallypoint.base.loop import LoopError
from rallypoint.base.private_files import replace_file
from rallypoint.control.etcd.api import EtcdError, EtcdPackageMissing, EtcdRefused
from rallypoint.control.protocol.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from rallypoint.failures.cause import Ending
from rallypoint.failures.report import ChildFailedError
from rallypoint.failures.texts import truncate
from rallypoint.store.errors import StoreError
from rallypoint.workers.reaper.client import ReaperDenied

VERDICT_FILE, TERMINATION_LOG = "RALLYPOINT_VERDICT_FILE", "RALLYPOINT_TERMINATION_LOG"
"""The environment variables for the paths of the files."""
DEFAULT_TERMINATION_LOG = "/dev/termination-log"
MAX_TERMINATION_LOG = 4096
"""Maximum size of Kubernetes' message, in bytes."""
VERSION = 1
_MAX_MESSAGE = 8 * 1024

log = get_logger(__name__)

CODES = {
    Ending.PROGRAM: 1,
    Ending.CONFIGURATION: 2,
    Ending.INFRASTRUCTURE: 75,  # EX_TEMPFAIL in sysexits.h
    Ending.REPEATED: 93,  # 93 and 94: do not retry
    Ending.HANG: 124,  # like timeout(1)
    Ending.PREEMPTED: 143,  # 128 + SIGTERM
    Ending.STOPPED: 94,
}
"""Exit code of each ending."""

IN_PLACE = 85
"""Another start on the same machine can help. The number is that of ERESTART."""
_OF_THIS_MACHINE = (PreflightError, ResourceError, SignalException, NodeLeftInOrder)
"""Endings after which this machine is unfit or will be taken away, so another start here cannot help."""

POD_INDEX = "JOB_COMPLETION_INDEX"
"""Set by Kubernetes in the pods of an Indexed Job. Kubernetes does not replace a pod that exited with 0."""
_ENDINGS: tuple[tuple[type[BaseException], Ending], ...] = (
    (UserError, Ending.CONFIGURATION),
    (JobPreempted, Ending.PREEMPTED),
    (EtcdRefused, Ending.CONFIGURATION),
    (EtcdPackageMissing, Ending.CONFIGURATION),
    (EtcdError, Ending.INFRASTRUCTURE),
    (RendezvousTimeoutError, Ending.INFRASTRUCTURE),
    (RendezvousConnectionError, Ending.INFRASTRUCTURE),
    (RendezvousClosedError, Ending.CONFIGURATION),  # the id of another job, or the rank of another node
    (RendezvousStateError, Ending.CONFIGURATION),
    (StoreError, Ending.INFRASTRUCTURE),
    (PreflightError, Ending.INFRASTRUCTURE),
    (DeniedError, Ending.CONFIGURATION),  # the next attempt would be denied too, as in the row below
    (ReaperDenied, Ending.CONFIGURATION),
    (ResourceError, Ending.INFRASTRUCTURE),
    (LoopError, Ending.INFRASTRUCTURE),
)
"""The endings of errors without one of their own. The first matching row counts; otherwise the program failed."""


class Classified(NamedTuple):
    """The result of a run. `ending` is None for a success, or if a person's signal ended the run."""

    ending: Ending | None
    code: int


SUCCESS = Classified(None, 0)


def classified(error: BaseException | None, *, is_pod: bool = False) -> Classified:
    """Classify a run. `is_pod`: this node is a pod. If evicted while the job continues, it must be replaced."""
    if error is None or isinstance(error, RendezvousGracefulExitError):
        return SUCCESS
    if isinstance(error, NodeLeftInOrder) and (error.drained or not is_pod):
        return SUCCESS
    if isinstance(error, KeyboardInterrupt):
        return Classified(None, 130)
    if isinstance(error, SignalException) and error.sigval != SIGTERM:
        return Classified(None, 128 + error.sigval)
    ending = ending_of(error)
    return Classified(ending, CODES[ending])


def code_in_place(error: BaseException | None, classification: Classified) -> int:
    """Return the code for `--exit-codes=in-place`: 85 instead of 75, unless this machine is the reason."""
    tried_again = classification.code == CODES[Ending.INFRASTRUCTURE] and not isinstance(error, _OF_THIS_MACHINE)
    return IN_PLACE if tried_again else classification.code


def ending_of(error: BaseException) -> Ending:
    """Why a run did not succeed.

    SIGTERM means that the machine will be taken away: the job was preempted if its work was saved; otherwise it can
    be retried unchanged.
    """
    if isinstance(error, SignalException):
        return Ending.PREEMPTED if error.saved else Ending.INFRASTRUCTURE
    if isinstance(error, ChildFailedError):
        return Ending(error.ending) if error.ending else Ending.PROGRAM
    if isinstance(error, RendezvousClosedError) and error.ending is not None:
        return error.ending
    return next((ending for kind, ending in _ENDINGS if isinstance(error, kind)), Ending.PROGRAM)


def finish(error: BaseException | None, code: int, job: str, exit_codes: str, environ: Mapping[str, str]) -> int:
    """Write the verdict of a run if requested. Returns the exit code.

    Args:
        error: the exception that ended the run, if any.
        code: torchrun's exit code.
        job: the job's id.
        exit_codes: the value of `--exit-codes`.
        environ: this process's environment.
    """
    classification = classified(error, is_pod=POD_INDEX in environ)
    if exit_codes == "in-place":
        code = code_in_place(error, classification)
    elif exit_codes == "classified":
        code = classification.code
    verdict = verdict_of(error, classification, code, job)
    path = environ.get(VERDICT_FILE, "")
    if path:
        try:
            replace_file(path, f"{json.dumps(verdict, indent=2)}\n".encode(), mode=0o666, sync=True)
        except OSError as trouble:
            log.error("%s=%s cannot be written: %s", VERDICT_FILE, path, trouble.strerror)
    shown = environ.get(TERMINATION_LOG) or DEFAULT_TERMINATION_LOG
    if code and os.path.isfile(shown):  # do not create it: outside of Kubernetes it does not exist
        with suppress(OSError), open(shown, "wb", buffering=0) as file:
            file.write(termination_message(verdict))
    return code


def verdict_of(error: BaseException | None, classification: Classified, code: int, job: str) -> dict[str, Any]:
    """The fields of a verdict, as documented in docs/reference/exit-codes.md."""
    cause = error.root_cause() if isinstance(error, ChildFailedError) else None
    text = "" if error is None else cause.headline if cause is not None else str(error) or type(error).__name__
    return {
        "version": VERSION,
        "job": job,
        "succeeded": code == 0,
        "code": code,
        "classified_code": classification.code,
        "ending": None if classification.ending is None else classification.ending.name.lower(),
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "ended_at": time.time(),
        "message": truncate(text, _MAX_MESSAGE),
        "cause": None
        if cause is None
        else {**cause._asdict(), "signal": cause.signal_name if cause.exitcode < 0 else ""},
    }


def termination_message(verdict: Mapping[str, Any]) -> bytes:
    """One line of JSON of at most `MAX_TERMINATION_LOG` bytes; long texts are shortened until it fits."""
    line = b""
    for most in (1200, 600, 300, 100, 0):
        cause = verdict["cause"]
        if cause is not None:
            without_traceback = {name: value for name, value in cause.items() if name != "traceback"}
            cause = {
                name: value[:most] if isinstance(value, str) else value for name, value in without_traceback.items()
            }
        shown = {
            **verdict,
            "job": verdict["job"][: max(most, 100)],
            "message": verdict["message"][:most],
            "cause": cause,
        }
        line = json.dumps(shown, separators=(",", ":")).encode()
        if len(line) <= MAX_TERMINATION_LOG:
            break
    return line
