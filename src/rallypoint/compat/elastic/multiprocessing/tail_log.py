"""In the place of `torch.distributed.elastic.multiprocessing.tail_log`: files that grow, shown line by line.

Only whole lines are written; what has no end of line when the tail ends is written then.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TextIO

from rallypoint.base.log import get_logger

__all__ = ["TailLog", "tail_logfile"]

log = get_logger(__name__)


def tail_logfile(
    header: str,
    file: str,
    dst: TextIO,
    finished: threading.Event,
    interval_sec: float,
    log_line_filter: Callable[[str], bool] | None = None,
) -> None:
    """Write the lines of a file as they come; returns once `finished` is set and all that is there was written.

    Args:
        header: what stands before each line.
        file: the path; the file may come later.
        dst: where lines go.
        finished: set when the file grows no more.
        interval_sec: seconds between two looks.
        log_line_filter: which lines are written; without one, none are, as with torch.
    """

    def write(line: str) -> None:
        if log_line_filter is not None and log_line_filter(line):
            dst.write(header + line)

    while not os.path.exists(file):
        if finished.wait(interval_sec) and not os.path.exists(file):
            return
    with open(file, errors="replace", newline="\n") as lines:
        rest = ""
        while True:
            over = finished.is_set()  # asked first: what was written before it was set is read below
            for piece in lines:
                rest += piece
                if rest.endswith("\n"):
                    write(rest)
                    rest = ""
            if over:
                break
            finished.wait(interval_sec)
    if rest:
        write(rest)


class TailLog:
    """Writes the lines of one file for each local rank to one place.

    Args:
        name: what messages call it; stands before each line as `[<name><local rank>]:` where no prefix is given.
        log_files: local rank to path.
        dst: where lines go.
        log_line_prefixes: local rank to what stands before its lines.
        interval_sec: seconds between two looks at a file.
        log_line_filter: which lines are written.
    """

    def __init__(
        self,
        name: str,
        log_files: Mapping[int, str],
        dst: TextIO,
        log_line_prefixes: Mapping[int, str] | None = None,
        interval_sec: float = 0.1,
        log_line_filter: Callable[[str], bool] = lambda _line: True,
    ) -> None:
        self._name = name
        self._log_files = dict(log_files)
        self._dst = dst
        self._prefixes = dict(log_line_prefixes or {})
        self._interval_sec = interval_sec
        self._log_line_filter = log_line_filter
        self._finished = threading.Event()
        self._pool: ThreadPoolExecutor | None = None
        self._tails: dict[int, Future[None]] = {}

    def start(self) -> TailLog:
        """Begin, with a thread for each file; returns itself."""
        if self._log_files and self._pool is None:
            self._pool = ThreadPoolExecutor(len(self._log_files), thread_name_prefix=f"tail-{self._name}")
            for rank, file in self._log_files.items():
                header = self._prefixes.get(rank, f"[{self._name}{rank}]:")
                self._tails[rank] = self._pool.submit(
                    tail_logfile, header, file, self._dst, self._finished, self._interval_sec, self._log_line_filter
                )
        return self

    def stop(self) -> None:
        """Write what is left, and end."""
        self._finished.set()
        for rank, tail in self._tails.items():
            error = tail.exception()
            if error is not None:
                log.error("the output of %s%d could not be written to its end (%s)", self._name, rank, error)
        if self._pool is not None:
            self._pool.shutdown()

    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._finished.is_set()
