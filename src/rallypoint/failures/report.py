"""The report at the end of a failed job: which worker failed first, where, how and why.

Its format is torchrun's (contract section 7.5), so that tools which search for it work. Unlike in torchrun, the first
failure can be on another node, a traceback is always shown, and workers that the launcher ended do not count as
failures. A job needs only one report: on all other nodes, one line with the cause replaces it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Mapping

from rallypoint.base.errors import RallypointError
from rallypoint.base.log import get_logger, ranges
from rallypoint.failures.cause import NO_RESTARTS, Cause, Ending, Restarts
from rallypoint.failures.failure import NO_FILE, ProcessFailure, iso_time
from rallypoint.failures.texts import OF_STDOUT, exit_text
from rallypoint.failures.tracebacks import exception_line, is_said_after, is_traceback

_log = get_logger(__name__)

_MAX_BAR_WIDTH = 60
_OF_NO_WORKER = (Ending.INFRASTRUCTURE, Ending.HANG)
"""Endings of a job without a failed worker."""


class ChildFailedError(RallypointError):
    """Workers failed. Its text is the report, or one line for it; `format_msg` always returns the report.

    Args:
        name: the script, module or command that the workers ran.
        failures: failures of this node's workers by global rank; may be empty if `cause` is set.
        cause: the first failure of the whole job; None if only this node's are known.
        stopped: global ranks of this node that the launcher ended, whether or not they are in `failures`.
        restarts: how many restarts the job used.
        reported_elsewhere: whether agents of other nodes print the report.
        ending: why the job ended (`cause.Ending`); empty for a failure of the program.
    """

    def __init__(
        self,
        name: str,
        failures: Mapping[int, ProcessFailure],
        cause: Cause | None = None,
        stopped: Collection[int] = (),
        restarts: Restarts = NO_RESTARTS,
        reported_elsewhere: bool = False,
        ending: str = "",
    ) -> None:
        assert failures or cause is not None, "a report needs a failure to report"
        super().__init__(name)
        self.name = name
        self.failures = dict(failures)
        self.cause = cause
        self.stopped = frozenset(stopped)
        self.restarts = restarts
        self.reported_elsewhere = reported_elsewhere
        self.ending = ending

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """Return global rank and failure of this node's worker that failed first, except stopped ones. Raises
        ValueError if none of this node's workers failed."""
        if (own := self._local_root_rank()) is not None:
            return own, self.failures[own]
        failed = [rank for rank in self.failures if rank not in self.stopped] or list(self.failures)
        first = min(failed, key=lambda rank: self.failures[rank].moment)
        return first, self.failures[first]

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        """Format the report; the delimiters are accepted for torch's callers, and ignored."""
        return self._report()

    def root_cause(self) -> Cause:
        if self.cause is not None:
            return self.cause
        rank, failure = self.get_first_failure()
        return Cause.from_failure(failure, rank, os.uname().nodename)

    def root_error_file(self) -> str:
        """The first failure's error file if it is on this node, else an empty text."""
        root = self._local_root_rank() if self.cause is not None else self.get_first_failure()[0]
        path = NO_FILE if root is None else self.failures[root].error_file
        return "" if path == NO_FILE else path

    def __str__(self) -> str:
        try:
            return self._line() if self.reported_elsewhere or self._has_no_worker() else self._report()
        except Exception as error:  # a failure can be an object of any class, and no report at all would be worse
            return self._fallback_report(error)

    def _line(self) -> str:
        """The cause, and where to find the report if there is one: without a failed worker, there is nothing more."""
        root = self.root_cause()
        if self._has_no_worker():
            return f"{self.name} FAILED: {root.headline}"
        own = sorted(rank for rank in self.failures if rank not in self.stopped)
        after = f"; here {rank_list(own)} failed after it" if own else ""
        return f"{self.name} FAILED: {root.headline}{after}; the full report is on {root.host}"

    def _report(self) -> str:
        root = self.root_cause()
        own_root = self._local_root_rank() if self.cause is not None else root.rank
        host = root.host if own_root is not None else os.uname().nodename if self.failures else ""
        others = [
            _block(index, Cause.from_failure(failure, rank, host))
            for index, (rank, failure) in enumerate(self.failures.items())
            if rank != own_root and rank not in self.stopped
        ]
        number = len(self.failures) if own_root is None else list(self.failures).index(own_root)
        first = _block(number, root, elsewhere=own_root is None)
        return _assemble(f"{self.name} FAILED", others, self._context_lines(own_root), first)

    def _fallback_report(self, error: Exception) -> str:
        lines = [
            f"{self.name} FAILED; the report cannot be created ({type(error).__name__}: {error}), but this is known:"
        ]
        for index, (rank, failure) in enumerate(self.failures.items()):
            try:
                lines.append(_block(index, Cause.from_failure(failure, rank, os.uname().nodename)))
            except Exception:
                lines.append(f"[{index}]: rank {rank}: {object.__repr__(failure)}")
        return "\n".join(lines)

    def _context_lines(self, own_root: int | None) -> list[str]:
        stopped = rank_list(self.stopped - {own_root})
        context = [f"Stopped by rallyrun: {stopped}"] if stopped else []
        return [*context, f"Restarts used: {self.restarts}"] if self.restarts.allowed else context

    def _has_no_worker(self) -> bool:
        """Whether the job failed without a failed worker, for a reason that one sentence states on all nodes."""
        root = self.cause
        return not self.failures and root is not None and root.rank < 0 and root.ending in _OF_NO_WORKER

    def _local_root_rank(self) -> int | None:
        if self.cause is None:
            return None
        own = self.failures.get(self.cause.rank)
        return self.cause.rank if own is not None and own.pid == self.cause.pid else None


def _assemble(title: str, others: list[str], context: list[str], first: str) -> str:
    widest = max(len(line) for text in (title, first, *others) for line in text.split("\n"))
    double, single = "=" * min(widest, _MAX_BAR_WIDTH), "-" * min(widest, _MAX_BAR_WIDTH)
    parts = ["", double, title, single, "Failures:", *(others or ["  <NO_OTHER_FAILURES>"])]
    for aside in context:
        parts += [single, aside]
    parts += [single, "Root Cause (first observed failure):", first, double]
    return "\n".join(parts)


def _block(index: int, cause: Cause, elsewhere: bool = False) -> str:
    signal = f" ({cause.signal_name})" if cause.exitcode < 0 else ""
    return "\n".join(
        (
            f"[{index}]:",
            f"  time      : {iso_time(cause.timestamp)}",
            f"  host      : {cause.host}{' (another node)' if elsewhere else ''}",
            f"  rank      : {cause.rank} (local_rank: {cause.local_rank})",
            f"  exitcode  : {cause.exitcode} (pid: {cause.pid}) {signal}",
            f"  error_file: {cause.error_file or NO_FILE}",
            "  traceback : " + _enriched(cause).rstrip("\n").replace("\n", "\n  "),
        )
    )


def _enriched(cause: Cause) -> str:
    """All that is known about why a worker failed, with the error handler's addition for a death by signal."""
    detail = failure_detail(cause)
    record = sys.modules.get("rallypoint.failures.record")  # a program with a different handler imported it
    if cause.exitcode >= 0 or record is None:
        return detail
    try:
        return str(record.get_error_handler().maybe_enrich_signal_failure_message(detail, cause.error_file or NO_FILE))
    except Exception:  # the handler is not ours
        _log.warning("the error handler failed to extend the report of a signal", exc_info=True)
        return detail


def failure_detail(cause: Cause) -> str:
    """All that is known about why a worker failed: its traceback, or its message and last lines."""
    if not cause.traceback:
        return cause.message
    line = exception_line(cause.traceback) if is_traceback(cause.traceback) else ""
    if line and line in cause.traceback and cause.message.startswith(line):
        remark = cause.message[len(line) :].strip().removeprefix("(").removesuffix(")")
        return cause.traceback if remark in cause.traceback else f"{cause.traceback}\n({remark})"
    is_whole = is_traceback(cause.traceback) and cause.message in cause.traceback
    if cause.error_file or (is_whole and not is_said_after(cause.message, cause.traceback)):
        return cause.traceback
    how = "The" if cause.message == exit_text(cause.exitcode) else f"{cause.message}; the"
    if cause.traceback.startswith(OF_STDOUT):
        return f"{how} last lines of {cause.traceback}"
    return f"{how} last lines of standard error:\n{cause.traceback}"


def rank_list(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 0-2, 5`; empty if there are none."""
    texts = ranges(ranks)
    if not texts:
        return ""
    return f"{'rank' if texts[0].isdigit() and len(texts) == 1 else 'ranks'} {', '.join(texts)}"
