"""One failed worker, with all that its node knows about it (contract section 6.2), and the file in which a worker
leaves the exception that ended it (section 7.1).

Reading that file never fails: one that is cut off or is not an error file counts as absent, with its text kept for the
report. The worker chose what is at the path: only a regular file is read, at most `MAX_SIZE` bytes of it, and its
numbers and texts are checked. Writing follows no symbolic link.
"""

from __future__ import annotations

import math
import os
import stat
import time
from contextlib import suppress

from rallypoint.base.light_dataclasses import dataclass, field
from rallypoint.base.light_typing import TYPE_CHECKING, NamedTuple, TypeAlias
from rallypoint.base.log import get_logger
from rallypoint.base.private_files import replace_file
from rallypoint.base.signals import signal_name

if TYPE_CHECKING:
    from collections.abc import Callable

JsonObject: TypeAlias = dict[str, object]

VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""The environment variable with the path."""

MAX_SIZE = 4 * 1024 * 1024
"""Bytes of an error file that are read; a traceback has some thousand."""
_MAX_RAW = 4096
_LATEST = 253402214400.0
"""Epoch seconds at the beginning of the last day of the year 9999, which every time zone can show."""

_logger = get_logger(__name__)


class ErrorFile(NamedTuple):
    """The contents of an error file: `data` is the parsed file, `message` its `message` member (a text in newer files).

    `text` and `callstack` are that message and the formatted traceback as texts. `timestamp` is in whole epoch seconds,
    `exact` the same with a fraction if the file's own time has it, else None.
    """

    path: str
    data: JsonObject
    message: str | JsonObject
    text: str
    callstack: str
    timestamp: int
    exact: float | None


class UnreadableErrorFile(NamedTuple):
    path: str
    raw: str


def read_error_file(path: str) -> ErrorFile | UnreadableErrorFile | None:
    """The contents of an error file; None if there is none, if it is empty, or if `path` is."""
    if not path or path == os.devnull:
        return None
    try:
        # O_NONBLOCK: a named pipe without a writer would block the agent forever.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if stat.S_ISDIR(status.st_mode):
            return None
        if not stat.S_ISREG(status.st_mode):
            return UnreadableErrorFile(
                path, f"(nothing: it is {_KINDS.get(stat.S_IFMT(status.st_mode), 'not a regular file')})"
            )
        data = _read(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
    raw = data[:MAX_SIZE].decode(errors="replace")
    if not raw.strip():
        return None
    whole = len(data) <= MAX_SIZE
    written = min(max(status.st_mtime, 0.0), _LATEST)
    return (_parse(path, raw, written) if whole else None) or UnreadableErrorFile(path, raw[:_MAX_RAW])


def _read(fd: int) -> bytes:
    """At most one byte more than `MAX_SIZE`."""
    data = b""
    while len(data) <= MAX_SIZE and (more := os.read(fd, MAX_SIZE + 1 - len(data))):
        data += more
    return data


_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def write_error_file(path: str, data: JsonObject) -> None:
    """Write an error file atomically. A failure is logged."""
    import json

    try:
        replace_file(path, json.dumps(data).encode(), mode=0o666)
    except OSError as error:
        _logger.warning("the error file %r cannot be written: %s", path, error)


def error_data(text: str, callstack: str, timestamp: float) -> JsonObject:
    """The contents of an error file; `text` is `<exception class>: <its text>`, `timestamp` epoch seconds."""
    extra: JsonObject = {"py_callstack": callstack, "timestamp": str(int(timestamp))}
    return {"message": {"message": text, "extraInfo": extra}}


def _parse(path: str, raw: str, written: float) -> ErrorFile | None:
    import json

    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    match data.get("message"):
        case str(text):
            timestamp = _timestamp_seconds(data.get("timestamp"), written)
            return ErrorFile(path, data, text, text, "", timestamp, _exact(timestamp, written))
        case dict(message):
            extra = message.get("extraInfo")
            known = extra if isinstance(extra, dict) else {}
            text = str(message.get("message", ""))
            callstack = str(known.get("py_callstack") or "")
            timestamp = _timestamp_seconds(known.get("timestamp"), written)
            return ErrorFile(path, data, message, text, callstack, timestamp, _exact(timestamp, written))
        case _:
            return None


def _timestamp_seconds(value: object, otherwise: float) -> int:
    """The file's timestamp, a number or its text; else the time at which the file was written."""
    if isinstance(value, str | int | float):
        with suppress(ValueError, OverflowError):  # not a number
            seconds = float(value)
            if math.isfinite(seconds) and 0 <= seconds < _LATEST:  # not nanoseconds, say
                return int(seconds)
    return int(otherwise)


def _exact(timestamp: int, written: float) -> float | None:
    """The file is written right after the exception was caught, so its own time adds the fraction of the second.

    Only if it is close: the time of a copied file, or of one on another machine's disk, means nothing.
    """
    return refine_timestamp(timestamp, written) if timestamp <= written < timestamp + 2 else None


def refine_timestamp(timestamp: int, moment: float) -> float:
    """The time in the second that begins at `timestamp` that is nearest to `moment`; both in epoch seconds."""
    return min(max(moment, float(timestamp)), timestamp + 0.999999)


NO_FILE = "<N/A>"
_HOW_TO_TRACE = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"


@dataclass
class ProcessFailure:
    """A worker's failure. Its error file is read here, once.

    Args:
        local_rank: which worker of this node.
        pid: its process.
        exitcode: 0 to 255, or -N for death by signal N.
        error_file: the path of its error file; `<N/A>` afterwards if there is none that can be read.
        last_lines: the end of its standard error, as bytes.
        log: the file with all of its standard error; empty if there is none.
        noticed_at: when the failure was noticed, in epoch seconds with fractions.

    `error_file_data`, `message` and `timestamp` (whole epoch seconds) are the contract's; `callstack` is the traceback
    from the error file or empty, `damaged` the text of an unreadable one, `reason` a better explanation (see
    `set_reason`), `context` other findings that may be related, such as a full disk. `moment` is the best estimate of
    when the worker failed, with fractions: it orders failures within one node.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    last_lines: bytes = field(default=b"", kw_only=True, repr=False)
    log: str = field(default="", kw_only=True, repr=False)
    noticed_at: float = field(default_factory=time.time, kw_only=True)
    error_file_data: JsonObject = field(init=False, repr=False)
    message: str | JsonObject = field(init=False)
    timestamp: int = field(init=False)
    moment: float = field(init=False)
    callstack: str = field(init=False, default="", repr=False)
    damaged: str = field(init=False, default="", repr=False)
    context: str = field(init=False, default="", repr=False)
    reason: str = field(init=False, default="", repr=False)

    def __post_init__(self) -> None:
        self.look_closer: Callable[[], str | None] | None = None
        """Finds a better explanation where that takes milliseconds; see `settle`."""
        reply = read_error_file(self.error_file)
        if isinstance(reply, ErrorFile):
            self.error_file_data = reply.data
            self.message = reply.message
            self.callstack = reply.callstack
            self.timestamp = reply.timestamp
            otherwise = refine_timestamp(reply.timestamp, self.noticed_at)
            self.moment = otherwise if reply.exact is None else reply.exact
            return
        if isinstance(reply, UnreadableErrorFile):
            self.damaged = f"the error file {reply.path} is damaged; it begins with {reply.raw!r}"
        self.context = _disk_full(os.path.dirname(self.error_file))
        self.error_file = NO_FILE
        self.error_file_data = {"message": "<NONE>"}
        self.timestamp = int(self.noticed_at)
        self.moment = self.noticed_at
        if self.exitcode < 0:
            self.message = f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}"
        else:
            self.error_file_data["errorTraits"] = {"category": "system_terminated_error", "retryability": "False"}
            self.message = _HOW_TO_TRACE

    def set_reason(self, reason: str) -> None:
        """Use this explanation as the message, unless it is empty."""
        if reason:
            self.reason = self.message = reason
            self.look_closer = None

    def settle(self) -> bool:
        """Look closer, if there is something to look at: after the failure was announced, which this would delay.

        Returns whether the explanation is another one.
        """
        look, self.look_closer = self.look_closer, None
        before, found = self.reason, None if look is None else look()
        self.set_reason(found or "")
        return self.reason != before

    @property
    def text(self) -> str:
        if isinstance(self.message, str):
            return self.message
        return str(self.message.get("message", self.message))

    def signal_name(self) -> str:
        """`SIGKILL` and the like; `<N/A>` if no signal ended the worker."""
        return signal_name(-self.exitcode) if self.exitcode < 0 else NO_FILE

    def timestamp_isoformat(self) -> str:
        """`YYYY-MM-DD_HH:MM:SS` in local time."""
        return iso_time(self.timestamp)


def iso_time(timestamp: float) -> str:
    """`YYYY-MM-DD_HH:MM:SS` in local time, of epoch seconds."""
    return time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(timestamp))


def _disk_full(folder: str) -> str:
    """A sentence if nothing more can be written below a folder, the one of the worker's output and error file."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return ""
    full = disk.f_bavail == 0 or disk.f_favail == 0 < disk.f_files
    return f"the disk is full under {folder}: its last output may be missing there" if full else ""
