"""The jobs on this machine, for commands: a file per running agent, and one per ended agent.

Both are in one folder per user (`job_folders`). A file contains a line per field, `name: value`. Laws:

1. A user reads their own folder; root reads all users'. For another user's files, size and number are limited, the
   fields are checked, and the process must belong to that user.
2. A running agent locks its file with `flock`: an unlocked file was left by a killed agent. The next command or agent
   of its user removes it, and writes a record if none exists: the reaper, which would have written it, was killed too.
3. Names are never reused, and a file is complete and locked before it gets its name, so it can be removed by name.
4. A job's token is in the file, but never in log lines or lists of jobs.
5. No job fails, waits or ends because of this file. A separate thread uses the disk. Failures are logged once, and
   retried later.
6. At most `_MOST_ENDED` files of ended agents exist, of at most `_LARGEST` bytes, none older than `_KEPT` seconds: each
   agent that writes one removes the others. Files whose names have any other form are never removed.
7. To record its end, an agent imports only this file and the modules that this file imported with the first workers.
8. A killed agent writes nothing. Therefore its reaper has the text for its record as soon as workers first start.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

from rallypoint.agent.feature import Agent, Feature
from rallypoint.agent.steps import WorkersStarted
from rallypoint.base.errors import JobPreempted, NodeLeftInOrder, SignalException
from rallypoint.base.light_typing import TYPE_CHECKING, Any, NamedTuple
from rallypoint.base.log import get_logger, printable
from rallypoint.base.private_files import replace_file
from rallypoint.control.protocol.errors import RendezvousClosedError
from rallypoint.failures.cause import Ending
from rallypoint.features.job_folders import make_folder, names_in, opened, user_folders
from rallypoint.rendezvous.handler import LocalJob

if TYPE_CHECKING:
    from rallypoint.agent.workers import WorkerController
    from rallypoint.features.kept_reports import ReportKeeper

_log = get_logger(__name__)

# The fields

_LARGEST = 16 * 1024
_LONGEST = 1024
"""Maximum number of characters in a text."""
_NUMBER = re.compile(r"[0-9]{1,10}")
_LAST_MOMENT = 253402214400.0
"""The start of the year 9999, in seconds since 1970."""


def _fields_in(fd: int) -> dict[str, str]:
    """Read a file's fields. Raises OSError, or ValueError if the file is too large or not lines of printable text."""
    data = os.read(fd, _LARGEST + 1)
    lines = data.decode().removesuffix("\n").split("\n")
    if len(data) > _LARGEST or not all(line.isprintable() for line in lines):
        raise ValueError("it is too large, or contains unprintable characters")
    return {name: value for name, _, value in (line.partition(": ") for line in lines)}


def _text(fields: Mapping[str, object]) -> str:
    return "".join(f"{name}: {value}\n" for name, value in fields.items())


def _job_in(fields: Mapping[str, str], user: int) -> LocalJob:
    """The job described in a file's fields. Raises ValueError or LookupError if a field is missing or invalid."""
    pid, began = fields["pid"], float(fields["began"])
    if not (_NUMBER.fullmatch(pid) and 0 < int(pid) < 2**31 and 0 <= began <= _LAST_MOMENT):
        raise ValueError("it contains an impossible number or time")
    return LocalJob(
        int(pid), fields["job"], fields["backend"], fields["endpoint"], fields["script"], began=began, user=user
    )


# Running agents

_RUNNING = re.compile(r"running-[0-9]+-[0-9a-f]{16}")
_DAY = 86400.0
"""Seconds between updates of the file's time, so that programs do not remove it as an old temporary file."""
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 600.0
"""The first and the maximum pause before a retry, in seconds."""
_SOON = 0.05
"""Pause before the second look for the coordinator: a node check may come first."""
_PATIENCE = 1.0
"""Seconds to wait at the end of a job until its file is removed."""


class LocalJobs(Feature):
    """Shows the job of one agent, and finally how it ended, to commands on this machine.

    The file is opened after the first look at events, so that no worker waits for it.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._file = LocalFile(self.workers)
        self._reports: ReportKeeper | None = None
        """None until workers first start."""
        self._folder = ""
        """Where the reaper writes the record if this agent is killed; empty until workers first start."""
        if self.workers.rendezvous.local_job() is not None:  # otherwise no command could reach this agent
            self._file.open()

    def messages(self) -> Mapping[type, Callable[[Any], None]]:
        return {WorkersStarted: self._on_workers_started}

    def close(self) -> None:
        if not self.workers.is_launched:  # otherwise commands must find the file or the record: see `finish`
            self._file.close()

    def _on_workers_started(self, event: WorkersStarted) -> None:
        if self.workers.is_launched:
            if self._reports is None:
                from rallypoint.features.kept_reports import ReportKeeper

                self._reports = ReportKeeper(self.workers)
            self._reports.on_workers_started(event.round)
            self._folder = record_if_killed(self.workers, self._folder)

    def finish(self, error: BaseException | None) -> None:
        if self._reports is not None:  # before the record, since commands find the report through it
            self._reports.keep(error)
        record_end(self.workers, error)
        self._file.close()


class LocalFile:
    """The file of this agent, and the socket on which commands can reach its coordinator while that has no server.

    A server takes 9 MB and 50 ms of imports, and most jobs never need one. A listening socket costs nothing, so the
    server starts when a command connects.
    """

    def __init__(self, workers: WorkerController) -> None:
        """Open nothing; see `open`."""
        self._workers = workers
        self._ends = -1
        """Readable after `close`."""
        self._thread = threading.Thread(target=self._run, name="rallypoint-local-file", daemon=True)
        self._file, self._path = -1, ""
        """The descriptor that locks the file; -1 for none."""
        self._serves = False

    def open(self) -> None:
        """Write the file on a separate thread. Never raises."""
        try:
            self._ends = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._thread.start()
        except (OSError, RuntimeError) as error:
            _log.warning("%s: %s", _NOT_FOUND, error)

    def close(self) -> None:
        """Remove the file. Idempotent; never raises."""
        if self._ends >= 0 and self._thread.ident is not None:
            os.eventfd_write(self._ends, 1)
            self._thread.join(_PATIENCE)
            if self._thread.is_alive():  # the disk does not respond: the user's next command removes the file
                return
        if self._ends >= 0:
            os.close(self._ends)
            self._ends = -1

    def _run(self) -> None:
        pause, complained, readable = _FIRST_PAUSE, False, set[int]()
        soon = _SOON
        while self._ends not in readable:
            try:
                listener = self._workers.rendezvous.open_to_commands()
                if not self._keep():
                    readable = _readable((self._ends,), soon)
                    soon = min(2 * soon, _FIRST_PAUSE)
                    continue
                awaited = -1 if listener is None or self._serves else listener.fileno()
                readable = _readable((self._ends, awaited), _DAY)
                if awaited in readable:
                    self._workers.rendezvous.serve_commands()
                    self._serves = True
            except Exception as error:
                if not complained:
                    _log.warning("%s: %s", _NOT_FOUND, error)
                complained = True
                readable = _readable((self._ends,), pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        self._remove()

    def _keep(self) -> bool:
        """Write the file, or update its time if it exists. Returns False while the coordinator's address is unknown.
        Raises OSError.
        """
        if self._file >= 0:
            os.utime(self._file)
            if os.fstat(self._file).st_nlink:
                return True
            self._remove()  # another process removed it
        job = job_of(self._workers)
        if job is None or not job.endpoint:
            return False
        folder = make_folder()
        path = os.path.join(folder, f"running-{job.pid}-{os.urandom(8).hex()}")
        self._file = os.open(new := f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            own = {"token": _token_of(job.job), "network": _network()}
            os.write(self._file, _text(job._asdict() | own).encode())
            os.rename(new, path)
        except BaseException:
            self._path = new
            self._remove()
            raise
        self._path = path
        for _ in _running(os.geteuid()):  # removes killed agents' files
            pass
        return True

    def _remove(self) -> None:
        if self._file >= 0:
            with suppress(OSError):
                os.unlink(self._path)
            os.close(self._file)
            self._file = -1


_NOT_FOUND = "commands on this machine cannot find this job, but the job continues"


def _readable(fds: Iterable[int], seconds: float) -> set[int]:
    """Wait at most `seconds` until a descriptor is readable. Returns the readable ones; -1 is ignored."""
    poller = select.poll()
    for fd in fds:
        if fd >= 0:
            poller.register(fd, select.POLLIN)
    return {fd for fd, _ in poller.poll(seconds * 1000)}


def job_of(workers: WorkerController) -> LocalJob | None:
    """The job of an agent, as commands on this machine see it; None if they cannot reach it."""
    found = workers.rendezvous.local_job()
    script = printable(workers.group.spec.get_program_name(), _LONGEST)
    return None if found is None else found._replace(script=script, began=workers.began_at, user=os.geteuid())


def local_jobs(*, own: bool = False) -> Iterator[LocalJob]:
    """Jobs of running agents on this machine: this user's or, for root without `own`, all users'."""
    user = os.geteuid() if own or os.geteuid() else None
    return (job for job, _ in _running(user))


def local_token(wanted: LocalJob) -> str:
    """The token of one of `local_jobs`, from its agent; empty for none. Another job may have the same id."""
    from rallypoint.base.secrets import is_token

    return next((token for job, token in _running(wanted.user) if job == wanted and is_token(token)), "")


def _token_of(job: str) -> str:
    from rallypoint.base.secrets import TOKEN_PREFIX, job_secret, token

    secret = job_secret()
    if secret is None:
        return ""
    return secret.texts[0] if secret.texts[0].startswith(TOKEN_PREFIX) else token(secret, job)


def _running(user: int | None) -> Iterator[tuple[LocalJob, str]]:
    """The jobs of running agents of a user, or of all users (None), with their tokens."""
    here = _network()
    with user_folders(user) as folders:
        for folder, owner in folders:
            for name in names_in(folder, owner, _RUNNING):
                with suppress(OSError, ValueError, LookupError), opened(folder, name, owner) as file:
                    if _is_held(file):
                        fields = _fields_in(file)
                        job = _job_in(fields, owner)
                        if fields["network"] == here and (owner == os.geteuid() or _is_of(job.pid, owner)):
                            yield job, fields["token"]
                    elif owner == os.geteuid():
                        os.unlink(name, dir_fd=folder)
                        _record_lost(_job_in(_fields_in(file), owner))


def _network() -> str:
    """The network namespace of this process. Several can share a folder, each with its own loopback."""
    try:
        return str(os.stat("/proc/self/ns/net").st_ino)
    except OSError:
        return ""


def _is_held(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _is_of(pid: int, user: int) -> bool:
    """Whether this user owns a process, since another user's file can name any process. Raises OSError."""
    with open(f"/proc/{pid}/status", "rb") as status:
        uids = next((line for line in status if line.startswith(b"Uid:")), b"")
    return b"%d" % user in uids.split()[1:]


# Ended agents

_MOST_ENDED, _KEPT = 100, 30 * 86400.0
_ALL_KILLED = (
    "all of its processes on this machine were killed at once, as when a container or the machine stops; the time is "
    "unknown"
)
_NOT_KEPT = "the outcome of the job cannot be saved on this machine: %s"
_ENDED = re.compile(r"([0-9]{14})-[0-9]+")
"""When an agent ended, in milliseconds since 1970, and its pid."""

OUTCOMES = frozenset({"succeeded", "failed", "stopped", "left", "killed"})
_OF_ERRORS: tuple[tuple[type[BaseException], str], ...] = (
    (NodeLeftInOrder, "left"),
    (SignalException, "stopped"),
    (KeyboardInterrupt, "stopped"),
    (JobPreempted, "stopped"),
)
"""The outcomes for errors; any other error means `failed`, and no error means success."""


class EndedJob(NamedTuple):
    """How a job ended, as far as one agent knows.

    `outcome` is succeeded, failed or stopped; or left or killed, if only this node ended and the job may have
    continued. `detail` is the reason; for a stop, also the operator. `ended` is in seconds since 1970. `round` is -1
    if none began. `log_dir` is empty without logs. `ending` is the name of an `Ending`; empty if unknown.
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
        """Seconds that the agent ran."""
        return max(0.0, self.ended - self.job.began)


_RECORDED = (*LocalJob._fields, *EndedJob._fields[1:])


def record_end(workers: WorkerController, error: BaseException | None) -> None:
    """Record how this agent's job ended, with an error or without one. The caller must then remove the file of the
    running agent.
    """
    try:
        outcome, detail, restarts = "succeeded", "", workers.group.restarts
        if error is not None:
            outcome, detail, restarts = _of_error(error, restarts)
        ended = _end_of(workers, outcome, detail, restarts, _ending_of(error))
        folder = make_folder()
        path = os.path.join(folder, f"{int(1000 * ended.ended):014}-{ended.job.pid}")
        replace_file(path, f"{_record(ended)}ended: {ended.ended}\n".encode())
        _clean(ended.ended)
    except Exception as trouble:  # for example a full disk, or a third-party handler
        _log.debug(_NOT_KEPT, trouble)


def record_if_killed(workers: WorkerController, folder: str) -> str:
    """Make the reaper write a record in this folder if this agent is killed; if empty, create and use the user's
    folder.

    Returns:
        The folder; empty if it could not be created.
    """
    try:
        folder = folder or make_folder()
        detail = "its agent was killed or crashed; what happened on other nodes is unknown here"
        ended = _end_of(workers, "killed", detail, workers.group.restarts)
        workers.ensure_reaper().set_record(folder, _record(ended))
    except Exception as trouble:
        _log.debug(_NOT_KEPT, trouble)
    return folder


def _record_lost(job: LocalJob) -> None:
    """Record that an agent and its reaper were killed, unless a record exists. Raises OSError."""
    if any((ended.job.pid, ended.job.began) == (job.pid, job.began) for ended in ended_jobs()):
        return
    ended = EndedJob(job, time.time(), "killed", _ALL_KILLED, -1, 0, 0, "")
    path = os.path.join(make_folder(), f"{int(1000 * ended.ended):014}-{job.pid}")
    replace_file(path, f"{_record(ended)}ended: {ended.ended}\n".encode())


def ended_jobs() -> Iterator[EndedJob]:
    """The records of this user's agents on this machine, newest first."""
    with user_folders(os.geteuid()) as folders:
        for name, folder in sorted(_ended_in(folders), reverse=True):
            with suppress(OSError, ValueError, LookupError), opened(folder, name, os.geteuid()) as file:
                yield _ended_job_in(_fields_in(file))


def _ended_in(folders: Iterable[tuple[int, int]]) -> Iterator[tuple[str, int]]:
    return ((name, folder) for folder, owner in folders for name in names_in(folder, owner, _ENDED))


def _record(ended: EndedJob) -> str:
    """The lines of a record, without the time."""
    return _text(
        {name: value for name, value in zip(_RECORDED, (*ended.job, *ended[1:]), strict=True) if name != "ended"}
    )


def _end_of(workers: WorkerController, outcome: str, detail: str, restarts: int, ending: str = "") -> EndedJob:
    spec, placement, known = workers.group.spec, workers.group.placement, workers.rendezvous.local_job()
    texts = (
        spec.rdzv_handler.get_run_id(),
        spec.rdzv_handler.get_backend(),
        "" if known is None else known.endpoint.removesuffix(":0"),
        spec.get_program_name(),
    )
    job, backend, endpoint, script = (printable(text, _LONGEST) for text in texts)
    logs = workers.logs_specs.run_log_dir
    return EndedJob(
        LocalJob(os.getpid(), job, backend, endpoint, script, workers.began_at, os.geteuid()),
        time.time(),
        outcome,
        printable(detail, _LONGEST),
        -1 if placement is None else placement.round,
        restarts,
        spec.max_restarts,
        printable(os.path.abspath(logs), _LONGEST) if logs else "",
        ending,
    )


def _ending_of(error: BaseException | None) -> str:
    """The name of the `Ending` for `--exit-codes=classified`; empty if unknown."""
    if isinstance(error, SignalException):
        return (Ending.PREEMPTED if error.saved else Ending.INFRASTRUCTURE).name
    if isinstance(error, JobPreempted):
        return Ending.PREEMPTED.name
    if isinstance(error, KeyboardInterrupt):
        return Ending.STOPPED.name
    ending = getattr(error, "ending", None)
    return Ending(ending).name if ending else ""


def _of_error(error: BaseException, restarts: int) -> tuple[str, str, int]:
    """Outcome, reason and number of restarts, as far as the error contains them."""
    from rallypoint.failures.texts import first_line

    outcome = next((word for kind, word in _OF_ERRORS if isinstance(error, kind)), "failed")
    if outcome == "failed":
        from rallypoint.failures.report import ChildFailedError

        if isinstance(error, ChildFailedError):
            return outcome, error.root_cause().headline, error.restarts.used
        if isinstance(error, RendezvousClosedError) and error.ending is Ending.STOPPED:
            outcome = "stopped"
    return outcome, first_line(str(error)) or type(error).__name__, restarts


def _clean(now: float) -> None:
    """Remove expired records, and the oldest ones."""
    with user_folders(os.geteuid()) as folders:
        for place, (name, folder) in enumerate(sorted(_ended_in(folders), reverse=True)):
            found = _ENDED.fullmatch(name)
            if place >= _MOST_ENDED or (found and int(found[1]) / 1000 < now - _KEPT):
                with suppress(FileNotFoundError):  # another agent is cleaning too
                    os.unlink(name, dir_fd=folder)


def _ended_job_in(fields: Mapping[str, str]) -> EndedJob:
    """Parse a record. Raises ValueError or LookupError if it is not ours."""
    if fields["outcome"] not in OUTCOMES or fields["ending"] not in {"", *Ending.__members__}:
        raise ValueError("it has an unknown outcome")
    job, ended = _job_in(fields, os.geteuid()), float(fields["ended"])
    if not job.began <= ended <= _LAST_MOMENT:
        raise ValueError("it contains impossible times")
    return EndedJob(
        job,
        ended,
        fields["outcome"],
        fields["detail"],
        int(fields["round"]),
        int(fields["restarts"]),
        int(fields["max_restarts"]),
        fields["log_dir"],
        fields["ending"],
    )
