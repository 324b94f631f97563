"""Directs the output of the workers of one start, from their first line to their last.

The path of a stream, by the log specs (contract section 6.4):

    redirected   the worker's descriptor is the file itself
    teed         the same, and the file is followed: whole lines with a prefix appear on the console
    neither      standard output is inherited; standard error passes through a relay unchanged, because the report
                 must be able to show the end of any script's standard error
    hidden       (local rank filtered out) standard output goes to /dev/null; standard error is read, not shown

Laws:
- a worker that dies leaves nothing unread: `last_lines` is complete as soon as the worker is dead, and `close` shows
  everything that dead workers wrote;
- a grandchild that holds a pipe open, or a console that blocks, delays `close` by `CLOSE_TIMEOUT` at most.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Collection, Mapping, Sequence

from rallypoint.base.clock import Deadline
from rallypoint.base.errors import UserError, user_error
from rallypoint.base.light_typing import TYPE_CHECKING, Any
from rallypoint.base.log import get_logger
from rallypoint.workers.logs.console import Console, ConsoleStream
from rallypoint.workers.logs.pump import CAPACITY, TAIL_SIZE, Pump, Relay, without_long_middles
from rallypoint.workers.logs.specs import LogsDest
from rallypoint.workers.logs.tail import LineFilter, Tail

if TYPE_CHECKING:
    from rallypoint.workers.logs.collapse import CollapsedStream, CollapsingSink

CLOSE_TIMEOUT = 5.0
"""Seconds that `Outputs.close` waits for a console that blocks."""

_logger = get_logger(__name__)


class Outputs:
    """The outputs of one start of workers.

    Args:
        dest: the files, from the log specs.
        ranks: the local ranks of those that are started.
        prefixes: local rank to the prefix of its teed lines.
        stdout, stderr: the console's descriptors.
        filters: of standard output and standard error: teed lines that contain one of these texts also go to the file
            that `dest` names.
        collapse: seconds within which equal teed lines of several ranks are shown once; 0 for never.
        global_ranks: local rank to global rank, for such lines.
        reads_all: whether standard output that goes to no file passes through this process, as standard error does.

    Raises:
        UserError: a file cannot be opened, or there are no descriptors left; says which and what to do.
    """

    def __init__(
        self,
        dest: LogsDest,
        ranks: Collection[int],
        prefixes: Mapping[int, str],
        stdout: int = 1,
        stderr: int = 2,
        *,
        filters: tuple[Sequence[str] | None, Sequence[str] | None] = (None, None),
        collapse: float = 0.0,
        global_ranks: Mapping[int, int] = {},
        reads_all: bool = False,
    ) -> None:
        self._files = dest.stdouts, dest.stderrs
        """Of standard output (0) and of standard error (1), as all that follows in pairs."""
        self._teed = dest.tee_stdouts, dest.tee_stderrs
        self._prefixes = prefixes
        self._collapse = collapse
        self._global_ranks = global_ranks
        self._collapsing: dict[int, CollapsingSink] = {}
        """By stream."""
        self._collapsed: dict[int, list[CollapsedStream]] = {}
        self._worker_ends: dict[int, list[int | None]] = {rank: [None, None] for rank in ranks}
        self.relays: tuple[dict[int, Relay], dict[int, Relay]] = {}, {}
        self._tails: dict[int, list[Tail | None]] = {rank: [None, None] for rank in ranks}
        self._console = Console(stdout, stderr)
        self._pumps: list[Pump] = []
        try:
            for sink in self._console.sinks:
                self._pumps.append(Pump(sink))
            for end, path in enumerate((dest.filtered_stdout, dest.filtered_stderr)):
                line_filter = LineFilter(path, texts) if path and (texts := filters[end]) else None
                if line_filter is not None:
                    self._pumps[-end].line_filters.append(line_filter)
                for rank in ranks:
                    self._open(end, rank, line_filter, relayed=end == 1 or reads_all)
            for pump in self._pumps:
                pump.start()
        except BaseException as error:
            self.close()
            for sink in self._console.sinks[len(self._pumps) :]:
                sink.close()
            if isinstance(error, OSError) and not isinstance(error, UserError):
                raise _refused(error) from error
            raise

    def stdio(self, local_rank: int) -> tuple[int | None, int | None]:
        """Descriptors for a worker's standard output and standard error; None means that it inherits ours."""
        out, err = self._worker_ends[local_rank]
        return out, err

    def started(self, local_rank: int) -> None:
        """The worker has its descriptors: close our copies. Idempotent."""
        ends, self._worker_ends[local_rank] = self._worker_ends[local_rank], [None, None]
        for fd in ends:
            if fd is not None:
                os.close(fd)

    def last_lines(self, local_rank: int) -> bytes:
        """The end, at most 64 KiB, of a worker's standard error up to now, wherever it goes; also after `close`.

        Empty if the file is gone.
        """
        relay = self.relays[1].get(local_rank)
        if relay is None:
            return _tail_of_file(self._files[1].get(local_rank, ""))
        last = relay.last_lines()
        for pump in self._pumps:
            pump.wake()
        return last

    def age(self, local_rank: int) -> float:
        """Seconds since a worker has written something that passes through here or goes to a file; -1 if it has not, or
        that is not known. It asks the file system.
        """
        relays = (each.get(local_rank) for each in self.relays)
        read_at = (each.read_at for each in relays if each is not None)
        ages = [time.monotonic() - at for at in read_at if at is not None]
        for path in self.paths(local_rank):
            with contextlib.suppress(OSError):
                if path and path != os.devnull and (seen := os.stat(path)).st_size:
                    ages.append(max(0.0, time.time() - seen.st_mtime))
        return min(ages, default=-1.0)

    def marks(self) -> object:
        """A value that changes when a worker has written anything that passes through here or goes to a file.

        It asks the file system. Any thread may call it.
        """
        files = (path for paths in self._files for path in paths.values())
        relays = (each for all_of in self.relays for each in all_of.values())
        return [each.read_at for each in relays], [_mark(path) for path in files if path and path != os.devnull]

    def paths(self, local_rank: int) -> tuple[str, str]:
        """Where a worker's standard output and standard error go, as `LogsDest` has it."""
        return self._files[0].get(local_rank, ""), self._files[1].get(local_rank, "")

    def log_of(self, local_rank: int) -> str:
        """The file that a worker's standard error is in, or empty."""
        path = self._files[1].get(local_rank, "")
        return "" if path == os.devnull else path

    def move(self, before: int, after: int) -> None:
        """A worker has another local rank from now on."""
        found: tuple[dict[int, Any], ...] = (*self._files, *self._teed, *self.relays)
        for each in (*found, self._worker_ends, self._tails, self._collapsed):
            if before in each:
                each[after] = each.pop(before)

    def relabel(self, local_rank: int, prefix: str, rank: int) -> None:
        """A worker continues with another global rank: from now on, start each of its teed lines with this prefix."""
        if local_rank in self._collapsed:
            for each in self._collapsed[local_rank]:
                each.relabel(prefix, rank)
            return
        for tail in self._tails[local_rank]:
            if tail is not None:
                tail.relabel(os.fsencode(prefix))

    def end(self, local_rank: int) -> None:
        """A worker has ended while others of this start continue: have all shown that it has written. Does not wait."""
        for end, tail in enumerate(self._tails[local_rank]):
            if tail is not None:
                self._pumps[-end].end_tail(tail)

    def label(self, local_rank: int, label: str) -> None:
        """From now on, start each line of a worker's standard error with this where it is shown."""
        relay = self.relays[1].get(local_rank)
        if relay is not None:
            relay.label(os.fsencode(label))
            for pump in self._pumps:
                pump.wake()
        elif (tail := self._tails[local_rank][1]) is not None:
            if local_rank in self._collapsed:
                self._collapsed[local_rank][-1].relabel(label)
            else:
                tail.relabel(os.fsencode(label))

    def close(self) -> None:
        """Show all that dead workers have written, then release everything. Idempotent."""
        for rank in list(self._worker_ends):
            self.started(rank)
        for pump in self._pumps:
            pump.stop()
        deadline = Deadline.after(CLOSE_TIMEOUT)
        if not all(pump.join(deadline.remaining()) for pump in self._pumps):
            _logger.warning("the console blocks; continuing without waiting for it")

    def _open(self, end: int, rank: int, line_filter: LineFilter | None, *, relayed: bool) -> None:
        """Open a stream of a worker: `end` is 0 for standard output, 1 for standard error."""
        path, prefix = self._files[end].get(rank, ""), self._prefixes.get(rank, "")
        if relayed and path in ("", os.devnull):
            self.relays[end][rank] = relay = Relay(None if path else self._console.open_stream(end))
            self._pumps[-end].relays.add(relay)
            self._worker_ends[rank][end] = relay.worker_end
        elif path:
            self._worker_ends[rank][end] = _open_log(path)
            shown = self._teed[end].get(rank, "")
            if shown and shown != os.devnull:
                tail = self._tails[rank][end] = Tail(shown, os.fsencode(prefix), line_filter)
                self._pumps[-end].add_tail(tail, shown, self._stream_of(end, rank, tail))

    def _stream_of(self, end: int, rank: int, tail: Tail) -> ConsoleStream | CollapsedStream:
        if not self._collapse:
            return self._console.open_stream(end)
        from rallypoint.workers.logs.collapse import CollapsingSink

        tail.relabel(b"")  # the line filter keeps the prefix
        if end not in self._collapsing:
            shown = [each for each, path in self._teed[end].items() if path != os.devnull]
            stream, ranks = self._console.open_stream(end), self._global_ranks
            self._collapsing[end] = CollapsingSink(stream, self._collapse, ranks, self._prefixes, shown)
            self._pumps[-end].collapsing.append(self._collapsing[end])
        source = self._collapsing[end].source(rank)
        self._collapsed.setdefault(rank, []).append(source)
        return source


def _mark(path: str) -> tuple[int, int] | None:
    try:
        seen = os.stat(path)
    except OSError:
        return None
    return seen.st_size, seen.st_mtime_ns


_OPEN_ERRORS = {
    errno.EMFILE: "start fewer workers, or raise this process's limit of open files (`ulimit -n`)",
    errno.ENFILE: "raise the machine's limit of open files (`sysctl fs.file-max`)",
}


def _refused(error: OSError) -> UserError:
    what, remedy = "the workers' output cannot be read", "name another folder with --log-dir"
    if error.filename == os.devnull:
        what, remedy = f"{os.devnull} cannot be opened", f"make it (`mknod -m 666 {os.devnull} c 1 3`)"
    elif error.filename:
        what = f"the log file {error.filename!r} cannot be made"
    remedy = _OPEN_ERRORS.get(error.errno or 0, remedy)
    return user_error(f"{what}: {error.strerror or error}; {remedy}", error)


def _open_log(path: str) -> int:
    # O_APPEND keeps lines whole if several processes share the file, or it is truncated.
    making = os.O_CREAT | os.O_TRUNC if path != os.devnull else 0  # a file in the place of /dev/null would grow
    return os.open(path, os.O_WRONLY | making | os.O_APPEND | os.O_CLOEXEC, 0o666)


def _tail_of_file(path: str) -> bytes:
    if not path:
        return b""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - CAPACITY))
        return without_long_middles(file.read(CAPACITY))[-TAIL_SIZE:]
    return b""
