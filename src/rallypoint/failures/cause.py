"""One failure as plain data of limited size, which can be sent."""

from __future__ import annotations

import os
from enum import StrEnum

from rallypoint.base.light_typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rallypoint.failures.failure import ProcessFailure

MAX_TRACEBACK = 16 * 1024
MAX_MESSAGE = 2 * 1024
MAX_PATH = 4 * 1024
"""Maximum sizes of the texts, in bytes of UTF-8."""

_STDERR_COPY = "the worker's standard error, which -t 2 also saves in a file"


class Restarts(NamedTuple):
    """Restarts used, and restarts allowed (also 0 if unknown)."""

    used: int = 0
    allowed: int = 0

    def __str__(self) -> str:
        return f"{self.used} of {self.allowed}"


NO_RESTARTS = Restarts()


class Ending(StrEnum):
    """Why a job or an agent did not succeed, as schedulers see it (`--exit-codes=classified`)."""

    PROGRAM = "the program failed"
    CONFIGURATION = "a value cannot work"
    INFRASTRUCTURE = "the infrastructure failed"
    REPEATED = "the same failure came back without progress"
    HANG = "the program hangs"
    PREEMPTED = "preempted after the workers had saved"
    STOPPED = "an operator stopped the job"


class Cause(NamedTuple):
    """One failed worker.

    `exitcode` is 0 to 255, or -N for death by signal N. `timestamp` is in epoch seconds on `host`'s clock, for people
    and not for comparison. `error_file` is a path on `host`, empty if the worker left none. `traceback` is the
    exception's traceback, else the end of the worker's standard error, else empty. If `rank` is negative, no worker
    failed, but something that its node needs to start workers. `ending` is why the job fails if this is its cause.
    """

    rank: int
    local_rank: int
    host: str
    pid: int
    exitcode: int
    message: str
    traceback: str
    timestamp: float
    error_file: str
    ending: Ending = Ending.PROGRAM

    @classmethod
    def from_failure(cls, failure: ProcessFailure, rank: int, host: str) -> Cause:
        """Create the cause of a failure (`explanation.message_and_traceback`)."""
        from rallypoint.failures.explanation import message_and_traceback
        from rallypoint.failures.failure import NO_FILE
        from rallypoint.failures.texts import truncate, truncate_end

        message, traceback = message_and_traceback(failure)
        error_file = "" if failure.error_file == NO_FILE else truncate_end(failure.error_file, MAX_PATH)
        path = (error_file if failure.callstack else "") or failure.log
        where = f"{os.path.abspath(path)} on {host}" if path else _STDERR_COPY
        return cls(
            rank=rank,
            local_rank=failure.local_rank,
            host=truncate_end(host, MAX_MESSAGE),
            pid=failure.pid,
            exitcode=failure.exitcode,
            message=truncate(message, MAX_MESSAGE),
            traceback=truncate(traceback, MAX_TRACEBACK, where),
            timestamp=failure.moment,
            error_file=error_file,
        )

    def is_of(self, other: Cause | None) -> bool:
        """Whether it is the same failure, even if its texts were cut on the way."""
        return other is not None and (self.rank, self.pid, self.timestamp) == (other.rank, other.pid, other.timestamp)

    @property
    def headline(self) -> str:
        from rallypoint.failures.texts import first_line

        if self.rank < 0:
            line = first_line(self.message)
            of_all = self.ending is Ending.HANG or line.startswith(self.host)
            return line if of_all else f"{self.host}: {line}"
        how = f"exit code {self.exitcode}" + (f", {self.signal_name}" if self.exitcode < 0 else "")
        return f"rank {self.rank} failed on {self.host} ({how}): {first_line(self.message)}"

    @property
    def signal_name(self) -> str:
        """`SIGKILL` and the like; `<N/A>` if no signal ended the worker."""
        from rallypoint.base.signals import signal_name

        return signal_name(-self.exitcode) if self.exitcode < 0 else "<N/A>"
