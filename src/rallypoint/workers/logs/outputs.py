"""Directs the output of the workers of one start, from their first line to their last.

The path of a stream, by the log specs (contract section 6.4):

    redirected   the worker's descriptor is the file itself
    teed         the same, and the file is followed: whole lines with a prefix appear on the console
    neither      standard output is inherited; standard error passes through a relay unchanged, because the report
                 must be able to show the end of any script's standard error
    hidden       (local rank filtered out) standard output goes to /dev/null; standard error is read, not shown

What passes through this process is forwarded to each sink by a thread (`Pump`), which sleeps while there is none. Laws:

- a worker that dies leaves nothing unread: `last_lines` is complete as soon as the worker is dead, and `close` shows
  everything that dead workers wrote;
- a grandchild that holds a pipe open, or a slow console, delays `close` by `CLOSE_TIMEOUT` at most, a console that
  nobody reads hardly at all;
- the thread waits in one place for pipes, pseudo-terminals, changes of followed files and calls from other threads;
- a source whose bytes wait is not read further, so that memory stays bounded and the worker writes at the console's
  pace;
- nothing that a console or a file does ends the thread before `stop`; then the rest of dead workers' output is
  forwarded;
- if a console is a pipe without a reader, its workers get EPIPE (and SIGPIPE, unless they ignore it, as
  Python does) at their next write, as without us;
- any thread may read a relay: one that learns of a worker's death can read the rest before any other has.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from fcntl import ioctl
from select import POLLIN

from rallypoint.base.clock import SYSTEM_CLOCK, Clock, Deadline
from rallypoint.base.errors import UserError, user_error
from rallypoint.base.kernel import Wakeup
from rallypoint.base.light_typing import TYPE_CHECKING, Any, Protocol
from rallypoint.base.log import get_logger
from rallypoint.workers.logs.console import Chunk, Console, ConsoleSink, ConsoleStream, write_all
from rallypoint.workers.logs.specs import LogsDest
from rallypoint.workers.logs.tail import READ_SIZE, LineFilter, Tail

if TYPE_CHECKING:
    from rallypoint.base.inotify import Inotify
    from rallypoint.workers.logs.console import Buffer

    class MergedStream(Protocol):
        """One worker's stream on a `Merger`: what a `ConsoleStream` is to a followed file whose prefix is empty."""

        def write_or_queue(self, data: bytes, now: float) -> None: ...

        def write_or_queue_chunk(self, chunk: Chunk, now: float) -> None: ...

        def write(self, *parts: Buffer) -> None: ...

        def backlog(self) -> int: ...

        def relabel(self, prefix: str, rank: int | None = None) -> None:
            """From now on, start the lines that this worker alone has written with this prefix; it has another global
            rank now, too, if one is given.
            """

    class Merger(Protocol):
        """Puts lines of several workers together, and shows them on one console stream. For the stream's thread."""

        def source(self, local_rank: int) -> MergedStream: ...

        def write_due(self, now: float) -> None:
            """Show what has waited long enough. Call it at `deadline`."""

        def deadline(self) -> float | None: ...

        def flush(self) -> None:
            """Show all that waits."""

    Merges = Callable[[ConsoleStream, Mapping[int, int], Mapping[int, str], Sequence[int]], Merger]
    """Makes a `Merger` of a stream, global ranks and prefixes by local rank, and the local ranks that write to it."""

CLOSE_TIMEOUT, _BLOCKED = 5.0, 0.1
"""Seconds that `Outputs.close` waits for a console that still takes something, and after which a write counts as one
that nobody reads: it is not waited for, since the loop of the job calls `close`."""

TAIL_SIZE = 64 * 1024
"""Bytes of a worker's standard error that are kept for the report."""

CAPACITY = 1024 * 1024
"""The most that a dead worker leaves unread: a pipe that it has made as large as it may."""

_MAX_LINE = 4 * 1024
"""Bytes of a line that are kept for the report."""

_CHUNK = 64 * 1024
_READ_SLICE = 4 * _CHUNK  # read at once, so that a fast worker wakes us less often

BACKLOG = 256 * 1024
"""A source with so many waiting bytes is not read further."""

SLICE = 1024 * 1024
"""Bytes of one followed file that are forwarded before the next file's."""

_FIONREAD = 0x541B
"""As in `termios`, which is not imported for it."""

POLL = 0.1
"""Seconds between polls of followed files if there is no inotify."""

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
        merges: makes what puts teed lines of several workers together; None to show each as it comes.
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
        merges: Merges | None = None,
        global_ranks: Mapping[int, int] = {},
        reads_all: bool = False,
    ) -> None:
        self._files = dest.stdouts, dest.stderrs
        """Of standard output (0) and of standard error (1), as all that follows in pairs."""
        self._teed = dest.tee_stdouts, dest.tee_stderrs
        self._prefixes = prefixes
        self._merges = merges
        self._global_ranks = global_ranks
        self._mergers: dict[int, Merger] = {}
        """By stream."""
        self._merged: dict[int, list[MergedStream]] = {}
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
        if any(each is not None and each.has_unread() for each in (relays.get(local_rank) for relays in self.relays)):
            ages.append(0.0)
        for path in self.paths(local_rank):
            with contextlib.suppress(OSError):
                if path and path != os.devnull and (seen := os.stat(path)).st_size:
                    ages.append(max(0.0, time.time() - seen.st_mtime))
        return min(ages, default=-1.0)

    def marks(self) -> object:
        """A value that changes when a worker has written anything that passes through here or goes to a file, and each
        time while what it has written is not read: the console holds us up then, and with us the worker.

        It asks the file system. Any thread may call it.
        """
        files = (path for paths in self._files for path in paths.values())
        relays = [relay for by_rank in self.relays for relay in by_rank.values()]
        heard = [time.monotonic() if relay.has_unread() else relay.read_at for relay in relays]
        return heard, [_mark(path) for path in files if path and path != os.devnull]

    def console_blocked_for(self) -> float:
        """For how many seconds the console has taken nothing of what it was given; 0.0 if nothing waits for it."""
        return max(sink.output_lock.blocked_for() for sink in self._console.sinks)

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
        for each in (*found, self._worker_ends, self._tails, self._merged):
            if before in each:
                each[after] = each.pop(before)

    def relabel(self, local_rank: int, prefix: str, rank: int) -> None:
        """A worker continues with another global rank: from now on, start each of its teed lines with this prefix."""
        if local_rank in self._merged:
            for each in self._merged[local_rank]:
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
            if local_rank in self._merged:
                self._merged[local_rank][-1].relabel(label)
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

    def _stream_of(self, end: int, rank: int, tail: Tail) -> ConsoleStream | MergedStream:
        if self._merges is None:
            return self._console.open_stream(end)
        tail.relabel(b"")  # the line filter keeps the prefix
        if end not in self._mergers:
            shown = [each for each, path in self._teed[end].items() if path != os.devnull]
            stream, ranks = self._console.open_stream(end), self._global_ranks
            self._mergers[end] = self._merges(stream, ranks, self._prefixes, shown)
            self._pumps[-end].mergers.append(self._mergers[end])
        source = self._mergers[end].source(rank)
        self._merged.setdefault(rank, []).append(source)
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


# What passes through this process


class Relay:
    """The reading end of one worker's standard error on its way to the console, whose end is kept for the report; shown
    on `stream` unless that is None.

    A pipe, or a raw pseudo-terminal if the console is a terminal, so that `isatty()` stays true for progress bars.
    `worker_end` is the worker's descriptor; who hands it over closes it here.
    """

    def __init__(self, stream: ConsoleStream | None) -> None:
        self.stream = stream
        self.fd, self.worker_end, self.terminal = _open_channel(stream)
        """Its own end is readable when the worker has written, or has closed its end; -1 once it is closed."""
        self._lock = threading.Lock()
        self._pending: list[bytes] = []
        self._label = b""
        self._in_line = False  # whether what was read last has not ended its line
        self._last = bytearray()
        self._length = 0
        """Bytes that were read in all."""
        self._ended = False
        self.read_at: float | None = None
        """When the worker was last heard, on the monotonic clock."""

    def read(self, limit: int = _READ_SLICE) -> bool:
        """Read what is there, about `limit` bytes at most. Returns whether there may be more, now or later."""
        with self._lock:
            while limit > 0 and not self._ended:
                try:
                    chunk = os.read(self.fd, _CHUNK)
                except BlockingIOError:
                    break
                except OSError:  # a pseudo-terminal's end of file is EIO
                    chunk = b""
                self._ended = not chunk
                if chunk:
                    self._append_to_tail(chunk)
                    limit -= len(chunk)
            return not self._ended

    def has_unread(self) -> bool:
        """Whether the worker has written something that was not read yet. For any thread."""
        with self._lock:
            if self.fd < 0:
                return False
            try:
                return ioctl(self.fd, _FIONREAD, bytes(4)) != bytes(4)
            except OSError:  # the other end of a pseudo-terminal is gone
                return False

    def take_pending(self) -> list[bytes]:
        """What was read and not yet taken, for the console: parts, none of them empty."""
        with self._lock:
            taken, self._pending = self._pending, []
            return taken

    def label(self, label: bytes) -> None:
        """From now on, start each line with this where it is shown; the first label counts."""
        with self._lock:
            if self._label or self.stream is None:
                return
            self._label = label
            if self._in_line:
                self._pending.append(b"\n")
                self._in_line = False  # whether what was read last has not ended its line

    def last_lines(self) -> bytes:
        """The end of what the worker has written, at most `TAIL_SIZE`, long lines without their middle."""
        self.read(CAPACITY)
        with self._lock:
            return without_long_middles(bytes(self._last))[-TAIL_SIZE:]

    def since(self, at: int) -> tuple[int, bytes]:
        """What was read after so many bytes, as far as it is kept, behind how many bytes. For any thread."""
        with self._lock:
            kept = bytes(self._last[-max(0, self._length - at) :]) if at < self._length else b""
            return self._length - len(kept), kept

    def close(self) -> None:
        """Close the reading end; `last_lines` stays available. Idempotent."""
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
            self.fd = -1
            self._ended = True

    def _append_to_tail(self, chunk: bytes) -> None:
        if self.stream is not None:
            self._pending.append(self._labelled(chunk) if self._label else chunk)
            self._in_line = not chunk.endswith(b"\n")
        self.read_at = time.monotonic()
        self._last += chunk
        self._length += len(chunk)
        if len(self._last) > 4 * TAIL_SIZE:  # rarely, since it copies
            self._last[:] = without_long_middles(bytes(self._last))[-TAIL_SIZE:]

    def _labelled(self, chunk: bytes) -> bytes:
        inside, end = (chunk[:-1], b"\n") if chunk.endswith(b"\n") else (chunk, b"")
        return (b"" if self._in_line else self._label) + inside.replace(b"\n", b"\n" + self._label) + end


class Pump:
    """The thread, and all that it reads; it owns and closes all that it is given.

    Add all of it, then call `start`.
    """

    def __init__(self, sink: ConsoleSink, clock: Clock = SYSTEM_CLOCK) -> None:
        self._sink = sink
        self._clock = clock
        self._poller = select.epoll()
        self._wakeup = Wakeup()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._closed = False
        self._lock = threading.Lock()  # for the two above and for calls after the end
        self.relays: set[Relay] = set()
        """Standard errors of workers, each forwarded to its stream if it has one."""
        self._listening: dict[int, Relay] = {}
        self._changed: set[Relay] = set()
        """Those that are to be waited for, or no longer, as soon as that is possible."""
        self._pipes: set[int] = set()
        self.line_filters: list[LineFilter] = []
        """Filters of some tails, closed at the end."""
        self._streams: dict[Tail, ConsoleStream | MergedStream] = {}
        self.mergers: list[Merger] = []
        """In which lines wait that are shown when it is due."""
        self._paths: list[tuple[str, Tail]] = []
        self._watches: dict[int, Tail] = {}
        self._unread_tails: dict[Tail, None] = {}  # in the order of their changes
        self._ended_tails: set[Tail] = set()
        self._buffer = bytearray()
        self._inotify: Inotify | None = None

    def add_tail(self, tail: Tail, path: str, stream: ConsoleStream | MergedStream) -> None:
        self._streams[tail] = stream
        self._unread_tails[tail] = None
        self._paths.append((path, tail))

    def end_tail(self, tail: Tail) -> None:
        """The followed file has no writer any more: show it to its end, and close it. From any thread."""
        self._ended_tails.add(tail)
        self.wake()

    def start(self) -> None:
        """Start the thread, if there is anything to read."""
        if not self.relays and not self._streams:
            return
        self._changed |= self.relays
        # Watch for pipes to the console that lose their reader (EPOLLERR, which is always on).
        fds = {relay.stream.fd for relay in self.relays if relay.stream is not None and relay.stream.fd is not None}
        self._pipes = {fd for fd in fds if stat.S_IFMT(os.fstat(fd).st_mode) in (stat.S_IFIFO, stat.S_IFSOCK)}
        for fd in self._pipes:
            self._poller.register(fd, 0)
        if self._streams:
            self._watch_files()
        self._poller.register(self._wakeup, POLLIN)
        thread = threading.Thread(target=self._run, name="rallypoint-output", daemon=True)
        thread.start()
        self._thread = thread

    def wake(self) -> None:
        """Forward what another thread has read from a relay. Safe from any thread, also after the end."""
        with self._lock:
            if not self._closed:
                self._wakeup.set()

    def stop(self) -> None:
        """Make it forward what is left, close everything and end. Does not wait. Idempotent."""
        self._stopping = True
        if self._thread is None:
            self._close()
        else:
            self.wake()

    def join(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end; returns whether it came. If not, a console blocks the thread."""
        if self._thread is None:
            return True
        deadline = Deadline.after(seconds)
        while self._thread.is_alive() and not deadline.expired and self._sink.output_lock.blocked_for() < _BLOCKED:
            self._thread.join(min(_BLOCKED, deadline.remaining()))
        return not self._thread.is_alive()

    def _watch_files(self) -> None:
        from rallypoint.base.inotify import Inotify

        self._buffer = bytearray(READ_SIZE)
        try:
            self._inotify = Inotify()
            self._watches = {self._inotify.watch(path): tail for path, tail in self._paths}
        except OSError as error:
            _logger.warning("log files are polled every %s s: %s", POLL, error)
            if self._inotify is not None:
                self._inotify.close()
            self._inotify, self._watches = None, {}
        else:
            self._poller.register(self._inotify, POLLIN)

    # The loop

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._run_once()
            self._finish()
        except Exception:
            _logger.exception("the output of workers can no longer be shown: a defect of Rallypoint, please report it")
        finally:
            self._close()

    def _run_once(self) -> None:
        self._listen()
        events = self._poller.poll(self._timeout())
        now = self._clock.monotonic()
        with self._sink.output_lock.hold():
            write_all(self._sink.scheduler.due_output(now))
            for merger in self.mergers:
                merger.write_due(now)
        for fd, _ in events:
            if (relay := self._listening.get(fd)) is not None:
                self._forward(relay, now)
            elif fd in self._pipes:
                self._nobody_reads(fd)
            elif fd == self._wakeup.fileno():
                self._wakeup.clear()
                for each in self.relays:
                    self._show(each, now)
                self._unread_tails.update((tail, None) for tail in self._ended_tails.copy() if tail in self._streams)
            else:
                self._read_inotify()
        if self._streams and self._inotify is None:
            self._unread_tails = dict.fromkeys(self._streams)
        for tail in list(self._unread_tails):
            self._with_io_errors(tail, self._follow, now)
        due = [tail for tail in self._streams if (at := tail.progress_bar_deadline()) is not None and now >= at]
        for tail in due:
            self._with_io_errors(tail, self._show_progress_bar, now)

    def _listen(self) -> None:
        """Wait for those relays whose bytes can be written."""
        for relay in tuple(self._changed):
            fd = relay.fd
            ready = relay.stream is None or relay.stream.backlog() < BACKLOG
            if ready and fd not in self._listening:
                self._poller.register(fd, POLLIN)
                self._listening[fd] = relay
            elif not ready and fd in self._listening:
                self._poller.unregister(fd)
                del self._listening[fd]
            if ready:
                self._changed.discard(relay)

    def _timeout(self) -> float | None:
        if any(self._streams[tail].backlog() < BACKLOG for tail in self._unread_tails):
            return 0.0
        due = [bar for tail in self._streams if (bar := tail.progress_bar_deadline()) is not None]
        deadlines = [self._sink.scheduler.deadline(), *(each.deadline() for each in self.mergers)]
        due += [each for each in deadlines if each is not None]
        wait = max(0.0, min(due) - self._clock.monotonic()) if due else None
        if self._streams and self._inotify is None:
            return POLL if wait is None else min(POLL, wait)
        return wait

    def _forward(self, relay: Relay, now: float) -> None:
        more = relay.read()
        if relay.terminal and relay.stream is not None and relay.stream.fd is not None:
            _copy_window_size(relay.stream.fd, relay.fd)
        self._show(relay, now)
        if not more:
            self._close_relay(relay)

    def _nobody_reads(self, fd: int) -> None:
        """Close the pipe's relays; what their workers have written so far is kept for the report."""
        self._poller.unregister(fd)
        self._pipes.discard(fd)
        for relay in [each for each in self.relays if each.stream is not None and each.stream.fd == fd]:
            relay.read(CAPACITY)
            self._close_relay(relay)

    def _close_relay(self, relay: Relay) -> None:
        if self._listening.pop(relay.fd, None) is not None:
            self._poller.unregister(relay.fd)
        for known in (self.relays, self._changed):
            known.discard(relay)
        relay.close()

    def _show(self, relay: Relay, now: float) -> None:
        if relay.stream is not None and (parts := relay.take_pending()):
            with self._sink.output_lock.hold():
                relay.stream.write_or_queue_chunk(Chunk([*parts], parts[-1].endswith(b"\n")), now)
            if relay.stream.backlog() >= BACKLOG:
                self._changed.add(relay)

    def _read_inotify(self) -> None:
        if self._inotify is None:
            return
        changed = self._inotify.changed()
        if changed is None:
            self._unread_tails = dict.fromkeys(self._streams)
        else:
            self._unread_tails.update(
                (tail, None) for number in changed if (tail := self._watches.get(number)) is not None
            )

    def _follow(self, tail: Tail, now: float) -> None:
        """Forward a slice of a file; the rest comes after the other files."""
        stream = self._streams[tail]
        if stream.backlog() >= BACKLOG:
            return
        del self._unread_tails[tail]
        left = SLICE
        for chunk in tail.chunks(now, self._buffer):
            stream.write_or_queue_chunk(chunk, now)
            left -= chunk.size()
            if chunk.ends and (left <= 0 or stream.backlog() >= BACKLOG):
                break
        if tail.has_unread():
            self._unread_tails[tail] = None
        elif tail in self._ended_tails:
            for chunk in tail.finish(now, self._buffer):
                stream.write_or_queue_chunk(chunk, now)
            self._drop(tail)

    def _show_progress_bar(self, tail: Tail, now: float) -> None:
        self._streams[tail].write_or_queue(tail.progress_bar(), now)

    def _with_io_errors(self, tail: Tail, act: Callable[[Tail, float], None], now: float) -> None:
        """Let a file that can no longer be read (on a lost network disk, say) affect only its own output."""
        try:
            with self._sink.output_lock.hold():  # until a line has ended
                act(tail, now)
        except OSError as error:
            _logger.warning("a worker's log file cannot be read, so its output is no longer shown here: %s", error)
            self._drop(tail)

    def _drop(self, tail: Tail) -> None:
        self._unread_tails.pop(tail, None)
        del self._streams[tail]
        self._watches = {number: each for number, each in self._watches.items() if each is not tail}
        with contextlib.suppress(OSError):
            tail.close()

    # The end

    def _finish(self) -> None:
        now = self._clock.monotonic()
        for relay in self.relays:
            relay.read(CAPACITY)
            self._show(relay, now)
        with self._sink.output_lock.hold():
            write_all(self._sink.scheduler.flush())
        for tail in list(self._streams):
            self._with_io_errors(tail, self._write_rest, now)
        with self._sink.output_lock.hold():
            for merger in self.mergers:
                merger.flush()
            write_all(self._sink.scheduler.flush())

    def _write_rest(self, tail: Tail, now: float) -> None:
        for chunk in tail.finish(now, self._buffer):
            self._streams[tail].write(*chunk.parts)

    def _close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._wakeup.close()
        closers: list[Callable[[], None]] = [tail.close for tail in self._streams]
        closers += [relay.close for relay in self.relays]
        closers += [each.close for each in self.line_filters]
        closers += [] if self._inotify is None else [self._inotify.close]
        closers += [self._poller.close, self._sink.close]
        for close in closers:
            close()


def without_long_middles(data: bytes) -> bytes:
    """The data, if more than `TAIL_SIZE`, with the middle of very long lines cut, so that one does not displace all."""
    if len(data) <= TAIL_SIZE:
        return data
    lines = data.split(b"\n")
    half = _MAX_LINE // 2
    return b"\n".join(line if len(line) <= _MAX_LINE else line[:half] + b"[...]" + line[-half:] for line in lines)


def _open_channel(stream: ConsoleStream | None) -> tuple[int, int, bool]:
    """A non-blocking reading end, the worker's end, and whether they are a pseudo-terminal."""
    if stream is not None and stream.fd is not None and os.isatty(stream.fd):
        with contextlib.suppress(OSError):  # none left, or none in this container
            return _open_terminal(stream)
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    # Of the usual size, 64 KiB: a user may have 64 MiB of pipes, those of data loaders included, and larger ones carry
    # no more (260 MB of standard error in 2.6 to 3.3 s with both).
    return reading, writing, False


def _open_terminal(stream: ConsoleStream) -> tuple[int, int, bool]:
    import tty

    ours, workers = os.openpty()
    os.set_blocking(ours, False)
    tty.setraw(workers)  # the real terminal does the processing
    if stream.fd is not None:
        _copy_window_size(stream.fd, ours)
    return ours, workers, True


def _copy_window_size(source: int, target: int) -> None:
    import termios

    with contextlib.suppress(termios.error, OSError):
        size = termios.tcgetwinsize(source)
        if termios.tcgetwinsize(target) != size:
            termios.tcsetwinsize(target, size)
