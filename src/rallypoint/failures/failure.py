"""One failed worker, with all that its node knows about it (contract section 6.2)."""

from __future__ import annotations

import os
import time

from rallypoint.base.light_dataclasses import dataclass, field
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.signals import signal_name
from rallypoint.failures.record import ErrorFile, JsonObject, UnreadableErrorFile, read_error_file, refine_timestamp

if TYPE_CHECKING:
    from collections.abc import Callable

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
