"""How jobs of this machine have ended: each agent leaves a small file about its own.

Laws:

1. The folder and its files are for their user alone, written and read as `base/private_files.py` says. A file has a
   line for each field, `name: value`.
2. There are at most `_MOST` files of at most `_LARGEST` bytes, and none is older than `_KEPT` seconds: who writes one
   removes the others. Nothing is removed whose name is not of the form that is written here.
3. A file that cannot be written or read is passed over: it never changes how a job ends.
4. An agent that ends imports nothing for it but this file.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress

from rallypoint.agent.features.local_socket import job_of
from rallypoint.base.errors import JobPreempted, NodeLeftInOrder, SignalException, UserError
from rallypoint.base.light_typing import TYPE_CHECKING, NamedTuple
from rallypoint.base.log import get_logger, printable
from rallypoint.base.private_files import is_private, make_private, open_regular, replace_file
from rallypoint.control.protocol.errors import RendezvousClosedError
from rallypoint.failures.cause import Ending
from rallypoint.rendezvous.handler import LocalJob
from rallypoint.workers.logs.specs import temporary_folder

if TYPE_CHECKING:
    from rallypoint.agent.workers import WorkerController

_log = get_logger(__name__)

_MOST, _KEPT, _LARGEST = 100, 30 * 86400.0, 16 * 1024
_LONGEST = 1024
"""Characters of a text."""
_LAST_MOMENT = 253402214400.0
"""The year 9999, in seconds since 1970."""
_NAME = re.compile(r"([0-9]{14})-[0-9]+")
"""The milliseconds since 1970 at which an agent ended, and its pid."""

OUTCOMES = frozenset({"succeeded", "failed", "stopped", "left"})
_OF_ERRORS: tuple[tuple[type[BaseException], str], ...] = (
    (NodeLeftInOrder, "left"),
    (SignalException, "stopped"),
    (KeyboardInterrupt, "stopped"),
    (JobPreempted, "stopped"),
)
"""The outcomes of errors; that of any other is `failed`, and without one the job has succeeded."""


class EndedJob(NamedTuple):
    """How a job has ended as one agent knows it.

    `outcome` is succeeded, failed, stopped, or left, where the job goes on without this node. `detail` says why, and
    who has stopped it. `ended` is in seconds since 1970, `round` -1 if none has begun, `log_dir` empty without logs.
    """

    job: LocalJob
    ended: float
    outcome: str
    detail: str
    round: int
    restarts: int
    max_restarts: int
    log_dir: str

    @property
    def seconds(self) -> float:
        """How long the agent has run."""
        return max(0.0, self.ended - self.job.began)


_FIELDS = (*LocalJob._fields, *EndedJob._fields[1:])


def record_end(workers: WorkerController, error: BaseException | None) -> None:
    """Leave how the job of this agent has ended: with that error, or without one."""
    try:
        ended = _end_of(workers, error)
        folder = _folder()
        make_private(folder)
        values = zip(_FIELDS, (*ended.job, *ended[1:]), strict=True)
        text = "".join(f"{name}: {value}\n" for name, value in values)
        replace_file(os.path.join(folder, f"{int(1000 * ended.ended):014}-{ended.job.pid}"), text.encode())
        _clean(folder, ended.ended)
    except Exception as trouble:  # such as a full disk, or a handler of others
        _log.debug("how the job has ended is not kept on this machine: %s", trouble)


def ended_jobs() -> Iterator[EndedJob]:
    """What agents of this user have left here, the newest first."""
    with suppress(UserError):
        folder = _folder()
        for name in sorted(_names(folder), reverse=True) if is_private(folder) else ():
            with suppress(OSError, ValueError, LookupError):
                yield _read(os.path.join(folder, name))


def _end_of(workers: WorkerController, error: BaseException | None) -> EndedJob:
    spec, placement, known = workers.group.spec, workers.group.placement, job_of(workers)
    texts = (
        spec.rdzv_handler.get_run_id(),
        spec.rdzv_handler.get_backend(),
        "" if known is None else known.endpoint.removesuffix(":0"),
        spec.get_program_name(),
    )
    job, backend, endpoint, script = (printable(each, _LONGEST) for each in texts)
    outcome, detail, restarts = "succeeded", "", workers.group.restarts
    if error is not None:
        outcome, detail, restarts = _of_error(error, restarts)
    logs = workers.logs_specs.run_log_dir
    return EndedJob(
        LocalJob(os.getpid(), job, backend, endpoint, script, workers.began_at, os.getuid()),
        time.time(),
        outcome,
        printable(detail, _LONGEST),
        -1 if placement is None else placement.round,
        restarts,
        spec.max_restarts,
        printable(os.path.abspath(logs), _LONGEST) if logs else "",
    )


def _of_error(error: BaseException, restarts: int) -> tuple[str, str, int]:
    """Outcome, reason and restarts used, as far as the error knows these."""
    from rallypoint.failures.report import ChildFailedError
    from rallypoint.failures.texts import first_line

    if isinstance(error, ChildFailedError):
        return "failed", error.root_cause().headline, error.restarts.used
    stopped = isinstance(error, RendezvousClosedError) and error.ending is Ending.STOPPED
    outcome = "stopped" if stopped else next((word for kind, word in _OF_ERRORS if isinstance(error, kind)), "failed")
    return outcome, first_line(str(error)) or type(error).__name__, restarts


def _folder() -> str:
    return os.path.join(temporary_folder(), f"rallypoint-ended-{os.getuid()}")


def _names(folder: str) -> list[str]:
    try:
        return [each for each in os.listdir(folder) if _NAME.fullmatch(each)]
    except OSError:
        return []


def _clean(folder: str, now: float) -> None:
    names = sorted(_names(folder))
    for place, name in enumerate(names, start=1):
        found = _NAME.fullmatch(name)
        if len(names) - place >= _MOST or (found and int(found[1]) / 1000 < now - _KEPT):
            with suppress(FileNotFoundError):  # another agent cleans too
                os.unlink(os.path.join(folder, name))


def _read(path: str) -> EndedJob:
    """Raises OSError, ValueError or LookupError: it is not a file of ours."""
    with open(open_regular(path), "rb") as file:
        text = file.read(_LARGEST + 1).decode()
    lines = text.removesuffix("\n").split("\n")
    found = dict(each.partition(": ")[::2] for each in lines)
    if len(text) > _LARGEST or found["outcome"] not in OUTCOMES or not all(each.isprintable() for each in lines):
        raise ValueError("it is too large, or has an unknown outcome, or what cannot be printed")
    job, backend, endpoint, script = (found[name] for name in LocalJob._fields[1:5])
    began, ended = float(found["began"]), float(found["ended"])
    if not 0 <= began <= ended <= _LAST_MOMENT:
        raise ValueError("it has times that cannot be")
    return EndedJob(
        LocalJob(int(found["pid"]), job, backend, endpoint, script, began, int(found["user"])),
        ended,
        found["outcome"],
        found["detail"],
        int(found["round"]),
        int(found["restarts"]),
        int(found["max_restarts"]),
        found["log_dir"],
    )
