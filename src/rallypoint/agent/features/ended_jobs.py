"""How jobs of this machine have ended: each agent leaves a small file about its own.

Laws:

1. The folder and its files are for their user alone, written and read as `base/private_files.py` says. A file has a
   line for each field, `name: value`.
2. There are at most `_MOST` files of at most `_LARGEST` bytes, and none is older than `_KEPT` seconds: the agent that
   writes one removes the others. Nothing is removed whose name is not of the form that is written here.
3. A file that cannot be written or read is passed over: it never changes how a job ends.
4. An agent that ends imports nothing for it but this file.
5. An agent that is killed writes nothing: its reaper has the file's text, from the first start of workers on.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress

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
    from rallypoint.workers.reaper.client import ReaperClient

_log = get_logger(__name__)

_MOST, _KEPT, _LARGEST = 100, 30 * 86400.0, 16 * 1024
_NOT_KEPT = "how the job has ended is not kept on this machine: %s"
_LONGEST = 1024
"""Characters of a text."""
_LAST_MOMENT = 253402214400.0
"""The year 9999, in seconds since 1970."""
_NAME = re.compile(r"([0-9]{14})-[0-9]+")
"""The milliseconds since 1970 at which an agent ended, and its pid."""

OUTCOMES = frozenset({"succeeded", "failed", "stopped", "left", "killed"})
_OF_ERRORS: tuple[tuple[type[BaseException], str], ...] = (
    (NodeLeftInOrder, "left"),
    (SignalException, "stopped"),
    (KeyboardInterrupt, "stopped"),
    (JobPreempted, "stopped"),
)
"""The outcomes of errors; that of any other is `failed`, and without one the job has succeeded."""


class EndedJob(NamedTuple):
    """How a job has ended as one agent knows it.

    `outcome` is succeeded, failed, stopped, or how this node has gone, so that the job can have continued without it:
    left, killed. `detail` says why, and who has stopped it. `ended` is in seconds since 1970, `round` -1 if none has
    begun, `log_dir` empty without logs, `ending` the name of an `Ending`, empty if it is not known.
    """

    job: LocalJob
    ended: float
    outcome: str
    detail: str
    round: int
    restarts: int
    max_restarts: int
    log_dir: str
    ending: str = ""

    @property
    def seconds(self) -> float:
        """How long the agent has run."""
        return max(0.0, self.ended - self.job.began)


_FIELDS = (*LocalJob._fields, *EndedJob._fields[1:])


def record_end(workers: WorkerController, error: BaseException | None) -> None:
    """Leave how the job of this agent has ended: with that error, or without one."""
    try:
        outcome, detail, restarts = "succeeded", "", workers.group.restarts
        if error is not None:
            outcome, detail, restarts = _of_error(error, restarts)
        ending = Ending.PREEMPTED if isinstance(error, JobPreempted) else getattr(error, "ending", None)
        ended = _end_of(workers, outcome, detail, restarts, Ending(ending).name if ending else "")
        make_private(folder := _folder())
        path = os.path.join(folder, f"{int(1000 * ended.ended):014}-{ended.job.pid}")
        replace_file(path, f"{_text(ended)}ended: {ended.ended}\n".encode())
        _clean(folder, ended.ended)
    except Exception as trouble:  # such as a full disk, or a handler of others
        _log.debug(_NOT_KEPT, trouble)


def record_if_killed(workers: WorkerController, reaper: ReaperClient) -> None:
    """Have the reaper leave that this agent was killed, if it is."""
    try:
        detail = "its agent was killed, or crashed; what became of other nodes is not known here"
        ended = _end_of(workers, "killed", detail, workers.group.restarts)
        make_private(folder := _folder())
        reaper.set_record(folder, _text(ended))
    except Exception as trouble:
        _log.debug(_NOT_KEPT, trouble)


def ended_jobs() -> Iterator[EndedJob]:
    """What agents of this user have left here, the newest first."""
    with suppress(UserError):
        folder = _folder()
        for name in sorted(_names(folder), reverse=True) if is_private(folder) else ():
            with suppress(OSError, ValueError, LookupError):
                yield _read(os.path.join(folder, name))


def _text(ended: EndedJob) -> str:
    """The lines of a record but that with the moment."""
    values = zip(_FIELDS, (*ended.job, *ended[1:]), strict=True)
    return "".join(f"{name}: {value}\n" for name, value in values if name != "ended")


def _end_of(workers: WorkerController, outcome: str, detail: str, restarts: int, ending: str = "") -> EndedJob:
    spec, placement, known = workers.group.spec, workers.group.placement, workers.rendezvous.local_job()
    texts = (
        spec.rdzv_handler.get_run_id(),
        spec.rdzv_handler.get_backend(),
        "" if known is None else known.endpoint.removesuffix(":0"),
        spec.get_program_name(),
    )
    job, backend, endpoint, script = (printable(each, _LONGEST) for each in texts)
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
        ending,
    )


def _of_error(error: BaseException, restarts: int) -> tuple[str, str, int]:
    """Outcome, reason and restarts used, as far as the error knows these."""
    from rallypoint.failures.texts import first_line

    outcome = next((word for kind, word in _OF_ERRORS if isinstance(error, kind)), "failed")
    if outcome == "failed":
        from rallypoint.failures.report import ChildFailedError

        if isinstance(error, ChildFailedError):
            return outcome, error.root_cause().headline, error.restarts.used
        if isinstance(error, RendezvousClosedError) and error.ending is Ending.STOPPED:
            outcome = "stopped"
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
    known = found["outcome"] in OUTCOMES and found["ending"] in {"", *Ending.__members__}
    if len(text) > _LARGEST or not known or not all(each.isprintable() for each in lines):
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
        found["ending"],
    )
