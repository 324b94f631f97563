"""An agent's record of a job for later queries: the report, and the last output of each of its workers.

It is a private file next to the record of the job's end (`local_jobs`). Its lines have the form `name: value`. The
lines of a text follow `name:` and begin with two spaces. Each `rank` starts another worker. Laws:

1. A file has at most about a megabyte, with 64 KiB per worker. A user has at most `_MOST` files, none older than
   `_KEPT` seconds: each agent that writes one removes the others.
2. An agent writes the file when its launch ends. It also writes one after a failure, once new workers have started,
   on a separate thread that no restart waits for. If the agent is killed later, at least that file exists.
3. The same user wrote the data, but it is still checked, and printable.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from rallypoint.base.light_typing import TYPE_CHECKING, NamedTuple
from rallypoint.base.log import get_logger, printable
from rallypoint.base.private_files import replace_file
from rallypoint.failures.cause import Restarts
from rallypoint.failures.report import ChildFailedError
from rallypoint.failures.texts import truncate
from rallypoint.failures.tracebacks import clean_lines
from rallypoint.features.job_folders import make_folder, names_in, opened, user_folders

if TYPE_CHECKING:
    from rallypoint.agent.workers import WorkerController
    from rallypoint.rendezvous.handler import LocalJob
    from rallypoint.workers.context import PContext
    from rallypoint.workers.logs.outputs import WorkerOutput

_log = get_logger(__name__)

_MOST, _KEPT = 64, 7 * 86400.0
_LARGEST_REPORT, _LARGEST_OF_RANK, _LARGEST_OF_RANKS = 64 * 1024, 64 * 1024, 896 * 1024
_LARGEST = 2 * 1024 * 1024
"""Maximum number of bytes to read, including names and indentation."""
_LONGEST = 8 * 1024
"""Maximum number of characters per line."""
_PATIENCE = 1.0
"""Seconds that a job waits at its end for an earlier round's unfinished report."""
_NAME = re.compile(r"report-[0-9]{14}-[0-9]+(\.[0-9]+\.[0-9a-f]{16})?")
"""The agent's start in milliseconds since 1970, and its pid. An unfinished file has the rest."""
_INDENT = "  "


class RankEnd(NamedTuple):
    """How one worker ended, and its last output.

    `exit_code` is None if unknown; `ending` is failed, stopped (by the launcher), succeeded, or empty. The files
    contain its full output; empty for none.
    """

    rank: int
    local_rank: int
    pid: int
    exit_code: int | None
    ending: str
    stdout_file: str
    stderr_file: str
    stdout: tuple[str, ...]
    stderr: tuple[str, ...]


class KeptReport(NamedTuple):
    """One agent's record of its job.

    `round` is the workers' round; `has_cause`: the job's first failure happened in one of them; `report` is the
    launcher's final output, empty after a success.
    """

    host: str
    round: int
    has_cause: bool
    report: tuple[str, ...]
    ranks: tuple[RankEnd, ...]


# Writing


class _Ended(NamedTuple):
    """One worker, with data from the loop."""

    rank: int
    local_rank: int
    pid: int
    exit_code: int | None
    ending: str
    output: WorkerOutput | None


class ReportKeeper:
    """Saves the reports of one agent. Call on its loop's thread."""

    def __init__(self, workers: WorkerController) -> None:
        self._workers = workers
        self._round = -1
        self._context: PContext | None = None
        """The workers started last. The controller may have none any more."""
        self._ranks: Mapping[int, int] = {}
        """The workers' global ranks, by local rank."""
        self._thread: threading.Thread | None = None

    def on_workers_started(self, round_: int) -> None:
        """Save how the previous workers ended, if they failed."""
        if self._context is not None and (found := self._context.poll()) is not None and found.failures:
            spec, ended = self._workers.group.spec, self._ended(self._context)
            failures = {self._ranks.get(rank, rank): failure for rank, failure in found.failures.items()}
            stopped = [worker.rank for worker in ended if worker.ending == "stopped"]
            restarts = Restarts(max(0, self._workers.group.restarts - 1), spec.max_restarts)
            error = ChildFailedError(spec.get_program_name(), failures, stopped=stopped, restarts=restarts)
            write = self._writer(ended, error)
            self._thread = threading.Thread(target=_quietly, args=(write,), name="rallypoint-report", daemon=True)
            self._thread.start()
        self._round, self._context = round_, self._workers.pcontext
        self._ranks = dict(self._workers.global_ranks())

    def keep(self, error: BaseException | None) -> None:
        """Save the report when the launch ends. Never raises."""
        if self._thread is not None:
            self._thread.join(_PATIENCE)
            if self._thread.is_alive():  # the disk does not answer, and this thread's file would replace ours
                return
        if self._context is not None:
            _quietly(self._writer(self._ended(self._context), error))

    def _ended(self, context: PContext) -> list[_Ended]:
        found, codes, stopped = context.poll(), context.exit_codes, context.stopped
        failed = () if found is None else found.failures

        def ending(rank: int) -> str:
            if rank in failed or rank in stopped:
                return "failed" if rank in failed else "stopped"
            return "succeeded" if codes.get(rank) == 0 else ""

        return [
            _Ended(self._ranks.get(rank, rank), rank, pid, codes.get(rank), ending(rank), context.output(rank))
            for rank, pid in context.program_pids().items()
        ]

    def _writer(self, ended: Sequence[_Ended], error: BaseException | None) -> Callable[[], None]:
        """Return a function, callable on any thread, that reads the outputs and writes the file."""
        round_, name = self._round, _name(self._workers.began_at, os.getpid())

        def write() -> None:
            cause = error.root_cause() if isinstance(error, ChildFailedError) else None
            has_cause = cause is not None and any(
                (cause.rank, cause.pid) == (worker.rank, worker.pid) for worker in ended
            )
            share = min(_LARGEST_OF_RANK, _LARGEST_OF_RANKS // max(1, len(ended)))
            ranks = tuple(_rank_end(worker, share) for worker in ended)
            kept = KeptReport(os.uname().nodename, round_, has_cause, _report_lines(error), ranks)
            replace_file(os.path.join(make_folder(), name), _text(kept).encode(errors="replace"))
            _clean(time.time())

        return write


def _quietly(write: Callable[[], None]) -> None:
    try:
        write()
    except Exception as trouble:  # such as a full disk
        _log.debug("the report cannot be saved on this machine: %s", trouble)


def _name(began: float, pid: int) -> str:
    return f"report-{int(1000 * began):014}-{pid}"


def _report_lines(error: BaseException | None) -> tuple[str, ...]:
    if error is None:
        return ()
    text = error.format_msg() if isinstance(error, ChildFailedError) else str(error) or type(error).__name__
    return _printable(truncate(text, _LARGEST_REPORT).strip("\n").split("\n"))


def _rank_end(ended: _Ended, share: int) -> RankEnd:
    output = ended.output
    stdout_file = stderr_file = ""
    stdout: tuple[str, ...] = ()
    stderr: tuple[str, ...] = ()
    if output is not None:
        stdout_file, stderr_file = map(_path, output.files)
        stdout, stderr = _end(output.last_stdout(), share // 2), _end(output.last_lines(), share // 2)
    return RankEnd(
        *(ended.rank, ended.local_rank, ended.pid, ended.exit_code, ended.ending),
        *(stdout_file, stderr_file, stdout, stderr),
    )


def _path(path: str) -> str:
    return "" if path in ("", os.devnull) else printable(os.path.abspath(path), _LONGEST)


def _end(data: bytes, most: int) -> tuple[str, ...]:
    """The last lines of an output, in at most `most` bytes."""
    kept: list[str] = []
    for line in reversed(_printable(clean_lines(data))):
        most -= len(line.encode(errors="replace")) + 1
        if most < 0:
            break
        kept.append(line)
    return tuple(reversed(kept))


def _printable(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(printable(line.expandtabs(), _LONGEST) for line in lines)


def _clean(now: float) -> None:
    """Remove expired files, and the oldest ones."""
    with user_folders(os.geteuid()) as folders:
        found: list[tuple[float, str, int]] = []
        for folder, owner in folders:
            for name in names_in(folder, owner, _NAME):
                with suppress(FileNotFoundError):  # another agent is cleaning too
                    seen = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    found.append((seen.st_mtime, name, folder))
        for place, (written, name, folder) in enumerate(sorted(found, reverse=True)):
            if place >= _MOST or written < now - _KEPT:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)


# Format


def _text(kept: KeptReport) -> str:
    lines = [f"host: {printable(kept.host)}", f"round: {kept.round}", f"has_cause: {kept.has_cause}"]
    lines += _text_field("report", kept.report)
    for end in kept.ranks:
        fields = list(zip(RankEnd._fields, end, strict=True))[:-2]
        lines += [f"{name}: {'' if value is None else value}" for name, value in fields]
        lines += [*_text_field("stdout", end.stdout), *_text_field("stderr", end.stderr)]
    return "\n".join(lines) + "\n"


def _text_field(name: str, lines: Iterable[str]) -> list[str]:
    return [f"{name}:", *(f"{_INDENT}{line}" for line in lines)]


# Reading


def kept_report(job: LocalJob) -> KeptReport | None:
    """The record of one of this user's jobs; None if none exists."""
    with user_folders(os.geteuid()) as folders:
        for folder, owner in folders:
            with suppress(OSError, ValueError, LookupError), opened(folder, _name(job.began, job.pid), owner) as file:
                return _report_in(file)
    return None


def _report_in(fd: int) -> KeptReport:
    """Read a report. Raises OSError, ValueError or LookupError if it is unreadable, too large, or not ours."""
    with open(os.dup(fd), "rb") as file:
        data = file.read(_LARGEST + 1)
    lines = data.decode().removesuffix("\n").split("\n")
    if len(data) > _LARGEST or not all(line.isprintable() for line in lines):
        raise ValueError("it is too large, or contains unprintable characters")
    head, *ranks = _groups(lines)
    return KeptReport(
        head["host"][0],
        int(head["round"][0]),
        head["has_cause"][0] == "True",
        tuple(head["report"][1]),
        tuple(_rank_in(fields) for fields in ranks),
    )


def _groups(lines: Iterable[str]) -> Iterator[dict[str, tuple[str, list[str]]]]:
    """The fields before the first rank, then those of each rank, each with value and lines."""
    fields: dict[str, tuple[str, list[str]]] = {}
    text: list[str] = []
    for line in lines:
        if line.startswith(_INDENT):
            text.append(line.removeprefix(_INDENT))
            continue
        name, _, value = line.partition(":")
        if name == "rank":
            yield fields
            fields = {}
        text = []
        fields[name] = value.removeprefix(" "), text
    yield fields


def _rank_in(fields: Mapping[str, tuple[str, list[str]]]) -> RankEnd:
    values = {name: value for name, (value, _) in fields.items()}
    rank, local_rank, pid = (int(values[name]) for name in ("rank", "local_rank", "pid"))
    code = int(values["exit_code"]) if values["exit_code"] else None
    files = values["stdout_file"], values["stderr_file"]
    stdout, stderr = (tuple(fields[name][1]) for name in ("stdout", "stderr"))
    return RankEnd(rank, local_rank, pid, code, values["ending"], *files, stdout, stderr)
