"""Directs the output of workers, from a run's first line to its last.

The path of a stream depends on the log specs (contract section 6.4):

    redirected   the worker's descriptor is the file itself
    teed         also, the file is followed: lines appear on the console with a prefix, whole if they end soon
    neither      it passes unchanged through a relay, because the report must be able to show the end of any script's
                 output
    hidden       (local rank filtered out) the same, but nothing is shown

One thread per console (`Pump`) forwards the output that passes through this process, and sleeps while there is none. It
lives as long as the run. Each start of workers adds relays and files; the workers' end removes them. Laws:

- a worker that dies leaves nothing unread: `last_lines` is complete as soon as the worker is dead, and
  `WorkerConsole.end` shows everything that dead workers wrote;
- a grandchild that keeps a pipe open, or a slow console, delays `end` by at most `CLOSE_TIMEOUT`. A console that nobody
reads hardly delays it: the rest is shown when the console accepts output again;
- the thread waits in one place for pipes, pseudo-terminals, changes in followed files and requests from other threads;
- from `Pump.add` to `Pump.end`, the thread owns its sources: it alone waits for them, shows them and closes them;
- a source with waiting bytes is not read further, so memory stays bounded, and the worker writes at the console's pace.
Other workers are shown meanwhile, however much dead workers left;
- no console or file can end the thread before `close`, which forwards all remaining output;
- if a console is a pipe without a reader, its workers get EPIPE (and SIGPIPE, unless they ignore it, as Python does) at
  their next write, as without us;
- any thread may read a relay: the first thread that learns of a worker's death can read the rest.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fcntl import ioctl
from select import POLLIN

from rallypoint.base.clock import SYSTEM_CLOCK, Clock, Deadline
from rallypoint.base.errors import UserError, user_error
from rallypoint.base.kernel import Wakeup
from rallypoint.base.light_typing import TYPE_CHECKING, NamedTuple, Protocol
from rallypoint.base.log import get_logger
from rallypoint.workers.logs.console import Chunk, ConsoleSink, ConsoleStream, open_sinks, write_all
from rallypoint.workers.logs.specs import LogsDest

if TYPE_CHECKING:
    from rallypoint.base.inotify import Inotify
    from rallypoint.workers.logs.tail import LineFilter

    class MergedStream(Protocol):
        """One worker's stream on a `Merger`, in place of a followed file's `ConsoleStream` with an empty prefix."""

        def write_or_queue(self, data: bytes, now: float) -> None: ...

        def write_or_queue_chunk(self, chunk: Chunk, now: float) -> None: ...

        def backlog(self) -> int: ...

        def relabel(self, prefix: str, rank: int | None = None) -> None:
            """Start lines that only this worker wrote with this prefix from now on; a rank replaces its global rank."""

    class Merger(Protocol):
        """Merges lines of several workers and shows them on one console stream. Only the stream's thread calls it."""

        def source(self, local_rank: int) -> MergedStream: ...

        def write_due(self, now: float) -> None:
            """Show lines that have waited long enough. Call this at `deadline`."""

        def deadline(self) -> float | None: ...

        def flush(self, now: float) -> None:
            """Show all waiting lines."""

    Merges = Callable[[ConsoleStream, Mapping[int, int], Mapping[int, str], Sequence[int]], Merger]
    """Creates a `Merger` from a stream, the global ranks and prefixes by local rank, and its writers' local ranks."""

CLOSE_TIMEOUT, _BLOCKED = 5.0, 0.1
"""Seconds that `WorkerConsole.end` waits for a console that still accepts output; seconds until a pending write means
that nobody reads the console. `end`, called by the job's loop, does not wait for such a console."""

_KEPT = 256 * 1024
"""Stream size in bytes above which only the end is stored for the report (`ends.TAIL_SIZE`)."""

CAPACITY = 1024 * 1024
"""Maximum bytes that a dead worker leaves unread: in a pipe enlarged to the limit."""

_CHUNK = 64 * 1024
_READ_SLICE = 4 * _CHUNK  # read many bytes at once, so that a fast worker wakes us less often

BACKLOG = 256 * 1024
"""A source with this many waiting bytes is not read further."""

SLICE = 1024 * 1024
"""Bytes of one followed file to forward before the next file's turn."""

_FIONREAD = 0x541B
"""As in `termios`, which is not worth an import."""

POLL = 0.1
"""Seconds between polls of followed files if inotify is unavailable."""

_logger = get_logger(__name__)


class WorkerConsole:
    """Shows a run's workers on two descriptors of this process, normally 1 and 2, which may be closed.

    Opened with the first workers, and reused for all later ones. For one thread at a time, except for `blocked_for`.
    """

    def __init__(self, stdout: int = 1, stderr: int = 2) -> None:
        self._descriptors = stdout, stderr
        self._pumps: list[Pump] = []
        """The pump of standard output first, that of standard error last: one pump if both lead to the same place."""
        self._is_late = False
        """Whether the last `end` stopped waiting before all output was shown."""

    def open(
        self,
        dest: LogsDest,
        ranks: Sequence[int],
        prefixes: Mapping[int, str],
        *,
        filters: tuple[Sequence[str] | None, Sequence[str] | None] = (None, None),
        merges: Merges | None = None,
        global_ranks: Mapping[int, int] = {},
    ) -> dict[int, WorkerOutput]:
        """Open the outputs of workers that are about to start, by local rank. Pass each to `end`.

        Args:
            dest: the files chosen by the log specs.
            ranks: the local ranks of these workers.
            prefixes: the prefixes of teed lines by local rank.
            filters: for standard output and standard error: texts; teed lines that contain one are also written to the
                file in `dest`.
            merges: creates the object that merges teed lines of several workers; None shows each line as it arrives.
            global_ranks: global ranks by local rank, for merged lines.

        Raises:
            UserError: a file cannot be opened, or no descriptor is free; the message says what to do.
        """
        outputs = {rank: WorkerOutput(dest.stdouts.get(rank, ""), dest.stderrs.get(rank, "")) for rank in ranks}
        line_filters = []
        try:
            self._pumps = self._pumps or [Pump(sink) for sink in open_sinks(*self._descriptors)]
            # Replace pumps that a defect ended, with the loss of some workers' output, for later workers.
            self._pumps = [Pump(pump.sink) if pump.failed else pump for pump in self._pumps]
            both = (dest.tee_stdouts, dest.filtered_stdout), (dest.tee_stderrs, dest.filtered_stderr)
            for end, ((teed, filtered), texts) in enumerate(zip(both, filters, strict=True)):
                pump, line_filter, merger = self._pumps[-end], None, None
                for output in outputs.values():
                    output.open(end, pump)
                in_files = [rank for rank, output in outputs.items() if output.files[end] and not output.relays[end]]
                shown = {rank: path for rank in in_files if (path := teed.get(rank, "")) not in ("", os.devnull)}
                if filtered and texts:
                    from rallypoint.workers.logs.tail import LineFilter

                    line_filters.append(line_filter := LineFilter(filtered, texts))
                if merges is not None and shown:
                    merger = merges(ConsoleStream(pump.sink, end), global_ranks, prefixes, [*shown])
                shared = Shared(line_filter, merger)
                for rank, path in shown.items():
                    stream, prefix = ConsoleStream(pump.sink, end), prefixes.get(rank, "")
                    outputs[rank].followed[end] = FollowedFile(path, prefix, rank, stream, shared)
                if line_filter is not None and not shown:
                    line_filter.close()
            for pump, sources in self._by_pump(outputs.values()):
                if pump.thread is None:
                    pump.start()
                pump.post(pump.add, sources)
        except BaseException as error:
            self.end(outputs.values())
            for line_filter in line_filters:
                line_filter.close()
            if isinstance(error, OSError) and not isinstance(error, UserError):
                raise _refused(error) from error
            raise
        return outputs

    def end(self, outputs: Collection[WorkerOutput]) -> None:
        """Show all output of these dead workers, and close their outputs here. Idempotent."""
        for output in outputs:
            output.close_worker_ends()
        # If nobody reads the console, nothing is lost and nothing waits:
        #   1. the thread waits in a write, and this request waits in its queue;
        #   2. we stop waiting, and new workers start. Their outputs are queued behind this request, while they write
        #      into their pipes and files;
        #   3. the console accepts output again. The thread handles this request, adds the new workers, and shows all
        #      output.
        requests = list(self._by_pump(outputs))
        for pump, sources in requests:
            pump.post(pump.end, sources)
        self._wait(requests)

    def blocked_for(self) -> float:
        """Seconds for which the console has accepted no output; 0.0 if no output is waiting."""
        return max((pump.sink.output_lock.blocked_for() for pump in self._pumps), default=0.0)

    def close(self) -> None:
        """Show all remaining output, end the threads and close everything. Idempotent; `open` starts again."""
        pumps, self._pumps = self._pumps, []
        for pump in pumps:
            if pump.thread is None or pump.failed:
                pump.sink.close()
        stops = [(pump, Sources([], [])) for pump in pumps if pump.thread is not None]
        for pump, sources in stops:
            pump.post(pump.stop, sources)
        # Wait only once for a console that accepts nothing:
        #   1. nobody reads it, so the last `end` stopped waiting, and the thread is still waiting to write;
        #   2. the run ends: `stop` is queued behind the request of that `end`;
        #   3. the thread handles both later, and then closes its descriptors itself, if this process lives that long.
        if not self._is_late:
            self._wait(stops)
        for pump, sources in stops:
            if sources.done.is_set() and pump.thread is not None:
                pump.thread.join()

    def _by_pump(self, outputs: Collection[WorkerOutput]) -> Iterator[tuple[Pump, Sources]]:
        """For each thread, its sources in these outputs, if any."""
        for number, pump in enumerate(self._pumps):
            ends = (number,) if len(self._pumps) == 2 else (0, 1)
            relays = [relay for output in outputs for end in ends if (relay := output.relays[end]) is not None]
            files = [file for output in outputs for end in ends if (file := output.followed[end]) is not None]
            if relays or files:
                yield pump, Sources(relays, files)

    def _wait(self, requests: Iterable[tuple[Pump, Sources]]) -> None:
        """Wait until these requests are complete, unless a console blocks a thread."""
        deadline = Deadline.after(CLOSE_TIMEOUT)
        self._is_late = False
        for pump, sources in requests:
            done = sources.done
            while not done.is_set() and not deadline.expired and pump.sink.output_lock.blocked_for() < _BLOCKED:
                done.wait(min(_BLOCKED, deadline.remaining()))
            self._is_late |= not done.is_set()
        if self._is_late:
            _logger.warning("the console is blocked; continuing without waiting for it")


class WorkerOutput:
    """The outputs of one worker; pairs are standard output (0) and standard error (1). Created by `WorkerConsole.open`.

    Any thread may use it, even after `WorkerConsole.end`.
    """

    def __init__(self, stdout: str, stderr: str) -> None:
        self.files = stdout, stderr
        """Paths; empty for the console, `/dev/null` to hide output."""
        self.log = "" if stderr == os.devnull else stderr
        """The file with the worker's standard error, or empty."""
        self.worker_ends: list[int | None] = [None, None]
        """The worker's descriptors; None once they are closed here."""
        self.relays: list[Relay | None] = [None, None]
        self.followed: list[FollowedFile | None] = [None, None]

    def open(self, end: int, pump: Pump) -> None:
        """Open a stream: a relay, unless the output goes to a file. Raises OSError."""
        path = self.files[end]
        if path in ("", os.devnull):
            relay = Relay(None if path else ConsoleStream(pump.sink, end), pump.wake)
            self.relays[end], self.worker_ends[end] = relay, relay.worker_end
        else:
            self.worker_ends[end] = _open_log(path)

    def close_worker_ends(self) -> None:
        """Close our copies of the worker's descriptors, which the worker now has. Idempotent."""
        ends, self.worker_ends = self.worker_ends, [None, None]
        for fd in ends:
            if fd is not None:
                os.close(fd)

    def last_lines(self) -> bytes:
        """The worker's last standard error, at most 64 KiB, wherever it goes; empty if it is gone. A traceback that is
        not in it but may have ended the program is put before it, with a line `[...]` between."""
        relay = self.relays[1]
        return _end_of_file(self.log) if relay is None else relay.last_lines()

    def last_stdout(self) -> bytes:
        """Like `last_lines`, for standard output."""
        relay = self.relays[0]
        return _end_of_file(self.files[0]) if relay is None else relay.last_lines()

    def age(self) -> float:
        """Seconds since the worker last wrote output that passes through here or goes to a file; -1 if it wrote
        nothing, or if unknown. Asks the file system."""
        relays = [relay for relay in self.relays if relay is not None]
        ages = [0.0 for relay in relays if relay.unread()]
        ages += [time.monotonic() - relay.read_at for relay in relays if relay.read_at is not None]
        for path in self.files:
            with contextlib.suppress(OSError):
                if path and path != os.devnull and (seen := os.stat(path)).st_size:
                    ages.append(max(0.0, time.time() - seen.st_mtime))
        return min(ages, default=-1.0)

    def marks(self) -> object:
        """A value that changes when the worker writes output that passes through here or goes to a file. It also
        changes on every call while output is unread: then the console blocks this process, and so the worker.

        Asks the file system.
        """
        relays = [relay for relay in self.relays if relay is not None]
        heard = [time.monotonic() if relay.unread() else relay.read_at for relay in relays]
        return heard, [_mark(path) for path in self.files if path and path != os.devnull]

    def relabel(self, prefix: str, rank: int) -> None:
        """Start the worker's teed lines with this prefix from now on: it continues with another global rank."""
        for file in self.followed:
            if file is not None:
                file.relabel(prefix, rank)

    def label(self, label: str) -> None:
        """Start each shown line of the worker's standard error with this label from now on."""
        relay, file = self.relays[1], self.followed[1]
        if relay is not None:
            relay.label(os.fsencode(label))
        elif file is not None:
            file.relabel(label)


class Shared(NamedTuple):
    """Shared by the followed files of one stream in one start, until the last of them is closed."""

    line_filter: LineFilter | None
    merger: Merger | None


class FollowedFile:
    """A worker's log file whose lines are shown. For its pump's thread, except for `relabel`.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str, prefix: str, rank: int, stream: ConsoleStream, shared: Shared) -> None:
        # Import this here, not on the pump's thread, for functions started by fork:
        #   1. the thread imports ctypes, which loads a library: it holds the locks of the import and of the loader;
        #   2. this thread forks a worker. In the worker's copy nobody ever releases these locks;
        #   3. the worker imports torch, and waits forever.
        import rallypoint.base.inotify  # noqa: F401
        from rallypoint.workers.logs.tail import Tail

        self.path = path
        self.tail = Tail(path, os.fsencode(prefix), shared.line_filter)
        self.stream: ConsoleStream | MergedStream = stream
        self.shared = shared
        self.watch = -1
        """Number of its inotify watch, if any."""
        self._merged: MergedStream | None = None
        if shared.merger is not None:
            self.stream = self._merged = shared.merger.source(rank)
            self.tail.relabel(b"")  # the line filter stores the prefix

    def relabel(self, prefix: str, rank: int | None = None) -> None:
        """Start lines that are not shown yet with another prefix; `rank` is as in `MergedStream.relabel`."""
        if self._merged is None:
            self.tail.relabel(os.fsencode(prefix))
        else:
            self._merged.relabel(prefix, rank)


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
    what, remedy = "the workers' output cannot be read", "choose another folder with --log-dir"
    if error.filename:
        what = f"the log file {error.filename!r} cannot be created"
    remedy = _OPEN_ERRORS.get(error.errno or 0, remedy)
    return user_error(f"{what}: {error.strerror or error}; {remedy}", error)


def _open_log(path: str) -> int:
    # With O_APPEND, lines stay whole if several processes share the file or it is truncated.
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)


def _end_of_file(path: str) -> bytes:
    from rallypoint.workers.logs.ends import end_of_file

    return end_of_file(path) if path else b""


# Output passing through this process


class Relay:
    """The reading end of one worker's stream on its way to the console (`stream`; None to hide it). Stores the last
    output for the report.

    Uses a pipe, or a raw pseudo-terminal if the console is a terminal, so that `isatty()` stays true for progress bars.
    `worker_end` is the worker's descriptor; the caller closes it here after handing it over. `wake` makes the pump show
    what was read.
    """

    def __init__(self, stream: ConsoleStream | None, wake: Callable[[], None]) -> None:
        self.stream = stream
        self._wake = wake
        self.fd, self.worker_end, self.terminal = _open_channel(stream)
        """Our own end: readable when the worker wrote something or closed its end; -1 once closed."""
        self._lock = threading.Lock()
        self._pending: list[bytes] = []
        self._label = b""
        self._in_line = False  # whether the last read output ended in the middle of a line
        self._last = bytearray()
        self._traceback = b""
        """The last traceback that is no longer in `_last` but may have ended the program."""
        self._length = 0
        """Bytes read in total."""
        self._ended = False
        self.read_at: float | None = None
        """When output was last read, on the monotonic clock."""

    def read(self, limit: int = _READ_SLICE) -> bool:
        """Read available output, at most about `limit` bytes. Returns whether more may follow, now or later."""
        with self._lock:
            while limit > 0 and not self._ended:
                try:
                    chunk = os.read(self.fd, _CHUNK)
                except BlockingIOError:
                    break
                except OSError:  # EIO is a pseudo-terminal's end of file
                    chunk = b""
                self._ended = not chunk
                if chunk:
                    self._append_to_tail(chunk)
                    limit -= len(chunk)
            return not self._ended

    def unread(self) -> int:
        """Bytes that the worker wrote and nobody read yet. For any thread."""
        with self._lock:
            if self.fd < 0:
                return 0
            try:
                return int.from_bytes(ioctl(self.fd, _FIONREAD, bytes(4)), sys.byteorder)
            except OSError:  # the pseudo-terminal's other end is gone
                return 0

    def take_pending(self) -> list[bytes]:
        """Take output that was read but not shown yet, for the console, in nonempty parts."""
        with self._lock:
            taken, self._pending = self._pending, []
            return taken

    def label(self, label: bytes) -> None:
        """Start each shown line with this label from now on; only the first label counts."""
        with self._lock:
            if self._label or self.stream is None:
                return
            self._label = label
            if self._in_line:
                self._pending.append(b"\n")
                self._in_line = False
        self._wake()

    def last_lines(self) -> bytes:
        """The worker's last output, as `ends` formats it."""
        from rallypoint.workers.logs.ends import joined, shortened

        self.read(CAPACITY)
        self._wake()
        with self._lock:
            return joined(*shortened(bytes(self._last), self._traceback))

    def since(self, at: int) -> tuple[int, bytes]:
        """The stored output after this many bytes, and its own offset. For any thread."""
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
        if len(self._last) > _KEPT:  # rarely, because this copies
            from rallypoint.workers.logs.ends import shortened

            self._traceback, self._last[:] = shortened(bytes(self._last), self._traceback)

    def _labelled(self, chunk: bytes) -> bytes:
        inside, end = (chunk[:-1], b"\n") if chunk.endswith(b"\n") else (chunk, b"")
        return (b"" if self._in_line else self._label) + inside.replace(b"\n", b"\n" + self._label) + end


class Sources:
    """Some workers' sources, for a request to a pump."""

    def __init__(self, relays: list[Relay], files: list[FollowedFile]) -> None:
        self.relays = relays
        self.files = files
        self.done = threading.Event()
        """Set when the request is complete."""

    def close(self) -> None:
        """Close all sources, and mark the request as complete."""
        for relay in self.relays:
            relay.close()
        for file in self.files:
            file.tail.close()
            if file.shared.line_filter is not None:
                file.shared.line_filter.close()
        self.done.set()


class Pump:
    """The thread that forwards workers' output to one console.

    Only the thread uses this object, except for `start` and `post`, with which one other thread requests `add`, `end`
    or `stop`, and `wake`, which any thread may call. Requests are handled in order.
    """

    def __init__(self, sink: ConsoleSink, clock: Clock = SYSTEM_CLOCK) -> None:
        self.sink = sink
        """Closed by the thread when it stops."""
        self.failed = False
        """Whether a defect ended the thread. Its sources are then closed, and the sink needs another pump."""
        self._clock = clock
        self.thread: threading.Thread | None = None
        self._requests: deque[tuple[Callable[[Sources], None], Sources]] = deque()
        self._open = False
        """Whether requests are accepted."""
        self._lock = threading.Lock()
        """Protects both of these, and keeps threads from writing to a closed wakeup."""
        self._wakeup: Wakeup
        self._poller: select.epoll
        self._stopping = False
        self._ending: list[Sources] = []
        """Dead workers' sources, until all their output is shown."""
        self._relays: set[Relay] = set()
        self._listening: dict[int, Relay] = {}
        self._changed: set[Relay] = set()
        """Relays to add to or remove from the poller."""
        self._pipes: set[int] = set()
        """The console's own descriptors that are pipes, watched for the loss of their readers."""
        self._files: set[FollowedFile] = set()
        self._unread: dict[FollowedFile, None] = {}
        """Files with something to show, in the order of their changes."""
        self._mergers: set[Merger] = set()
        """Mergers whose lines wait until they are due."""
        self._watches: dict[int, FollowedFile] = {}
        self._inotify: Inotify | None = None
        self._buffer = bytearray()

    # For other threads

    def start(self) -> None:
        """Raises OSError or RuntimeError: no descriptor is free, or this machine has no resources for a thread."""
        poller, self._wakeup = select.epoll(), Wakeup()
        poller.register(self._wakeup, POLLIN)
        self._poller, self._open = poller, True
        self.thread = threading.Thread(target=self._run, name="rallypoint-output", daemon=True)
        try:
            self.thread.start()
        except RuntimeError:
            self.thread, self._open = None, False
            self._wakeup.close()
            raise

    def post(self, request: Callable[[Sources], None], sources: Sources) -> None:
        """Request a call of this method with these sources. If the thread is not running, they are closed."""
        with self._lock:
            if self._open:
                self._requests.append((request, sources))
                self._wakeup.set()
                return
        sources.close()

    def wake(self) -> None:
        """Show what another thread read from a relay. Permitted even after the end."""
        with self._lock:
            if self._open:
                self._wakeup.set()

    # Thread's loop

    def _run(self) -> None:
        try:
            while not self._stopping or self._ending:
                self._run_once()
        except Exception:
            self.failed = True
            self._ending.append(Sources([*self._relays], [*self._files]))
            _logger.exception(
                "the workers' output can no longer be shown; this is a bug in Rallypoint (please report it)"
            )
        finally:
            self._close()

    def _run_once(self) -> None:
        self._listen()
        events = self._poller.poll(self._timeout())
        now = self._clock.monotonic()
        if output := self.sink.scheduler.due_output(now):
            with self.sink.output_lock.hold():
                write_all(output)
        for fd, _ in events:
            if (relay := self._listening.get(fd)) is not None:
                self._forward(relay, now)
            elif fd in self._pipes:
                self._nobody_reads(fd)
            elif fd == self._wakeup.fileno():
                self._wakeup.clear()
                for relay in tuple(self._relays):
                    self._show(relay, now)
            else:
                self._read_inotify()
        # Handle requests after clearing the wakeup, so that none is missed:
        #   1. the thread wakes, and another thread now makes a request, which is handled here; or
        #   2. the request arrives after the queue was found empty. Then its wakeup is still set, so the next poll
        #      returns at once.
        while self._requests:
            request, sources = self._requests[0]
            request(sources)
            self._requests.popleft()  # only now, so that `_close` also answers a request that raised
        if self._files:
            self._show_files(now)
        if shown := [sources for sources in self._ending if self._files.isdisjoint(sources.files)]:
            if output := self.sink.scheduler.flush():  # do not wait for another worker's line to end
                with self.sink.output_lock.hold():
                    write_all(output)
            self._ending = [sources for sources in self._ending if sources not in shown]
            for sources in shown:
                sources.done.set()

    def _listen(self) -> None:
        """Wait only for relays whose bytes can be written."""
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
        if any(file.stream.backlog() < BACKLOG for file in self._unread):
            return 0.0
        due = [at for file in self._files if (at := file.tail.unfinished_deadline()) is not None]
        deadlines = [self.sink.scheduler.deadline(), *(merger.deadline() for merger in self._mergers)]
        due += [deadline for deadline in deadlines if deadline is not None]
        wait = max(0.0, min(due) - self._clock.monotonic()) if due else None
        if self._files and self._inotify is None:
            return POLL if wait is None else min(POLL, wait)
        return wait

    # Requests

    def add(self, sources: Sources) -> None:
        """Read these sources from now on."""
        self._relays.update(sources.relays)
        self._changed.update(sources.relays)
        for fd in self.sink.pipes - self._pipes:
            self._poller.register(fd, 0)  # EPOLLERR is always reported: the pipe lost its reader
            self._pipes.add(fd)
        for file in sources.files:
            # No output is missed, although the worker might already be running:
            #   1. if it writes before the watch exists, the first read below finds that;
            #   2. if it writes later, the watch reports it.
            self._watch(file)
            self._files.add(file)
            self._unread[file] = None
            if file.shared.merger is not None:
                self._mergers.add(file.shared.merger)
        sources.done.set()

    def end(self, sources: Sources) -> None:
        """Show all output of these dead workers, and close their sources."""
        now = self._clock.monotonic()
        for relay in sources.relays:
            if relay in self._relays:  # otherwise it ended by itself, or was never added because `open` was interrupted
                relay.read(CAPACITY)
                self._show(relay, now)
            self._close_relay(relay)
        for file in sources.files:
            if file in self._files:
                self._unread[file] = None
                self._with_io_errors(file, lambda file, _: file.tail.end(), now)
            else:
                file.tail.close()
        self._ending.append(sources)

    def stop(self, sources: Sources) -> None:
        """Show all remaining output, close everything and end."""
        self._stopping = True
        sources.relays += self._relays
        sources.files += self._files
        self.end(sources)

    def _watch(self, file: FollowedFile) -> None:
        """Make the kernel report writes to a file. If it cannot, poll all files as long as any of these is open."""
        from rallypoint.base.inotify import Inotify
        from rallypoint.workers.logs.tail import READ_SIZE

        if self._inotify is None and self._files:
            return
        self._buffer = self._buffer or bytearray(READ_SIZE)
        try:
            if self._inotify is None:
                self._inotify = Inotify()
                self._poller.register(self._inotify, POLLIN)
            file.watch = self._inotify.watch(file.path)
            self._watches[file.watch] = file
        except OSError as error:
            _logger.warning("log files cannot be watched, so they are polled every %s s: %s", POLL, error)
            if self._inotify is not None:
                self._poller.unregister(self._inotify)
                self._inotify.close()
            self._inotify, self._watches = None, {}

    # Relays

    def _forward(self, relay: Relay, now: float) -> None:
        more = relay.read()
        if relay.terminal and relay.stream is not None and relay.stream.fd is not None:
            _copy_window_size(relay.stream.fd, relay.fd)
        self._show(relay, now)
        if not more:
            self._close_relay(relay)

    def _nobody_reads(self, fd: int) -> None:
        """Close the pipe's relays; their workers' output so far stays available to the report."""
        self._poller.unregister(fd)
        self._pipes.discard(fd)
        for relay in [relay for relay in self._relays if relay.stream is not None and relay.stream.fd == fd]:
            relay.read(CAPACITY)
            self._close_relay(relay)

    def _close_relay(self, relay: Relay) -> None:
        # Unregister the relay too, because the poller outlives a start of workers:
        #   1. a worker that is a forked copy of this process has a copy of this end, and keeps the pipe open;
        #   2. the relay is closed here, and its number goes to another descriptor;
        #   3. something writes into the pipe: the poller reports that number again and again.
        if self._listening.pop(relay.fd, None) is not None:
            self._poller.unregister(relay.fd)
        for known in (self._relays, self._changed):
            known.discard(relay)
        relay.close()

    def _show(self, relay: Relay, now: float) -> None:
        if relay.stream is not None and (parts := relay.take_pending()):
            with self.sink.output_lock.hold():
                relay.stream.write_or_queue_chunk(Chunk([*parts], parts[-1].endswith(b"\n")), now)
            if relay.stream.backlog() >= BACKLOG:
                self._changed.add(relay)

    # Followed files

    def _show_files(self, now: float) -> None:
        for merger in self._mergers:
            if (at := merger.deadline()) is not None and now >= at:
                with self.sink.output_lock.hold():
                    merger.write_due(now)
        if self._inotify is None:
            self._unread = dict.fromkeys(self._files)
        for file in list(self._unread):
            self._with_io_errors(file, self._follow, now)
        due = [file for file in self._files if (at := file.tail.unfinished_deadline()) is not None and now >= at]
        for file in due:
            self._with_io_errors(file, self._show_unfinished, now)

    def _read_inotify(self) -> None:
        if self._inotify is None:
            return
        changed = self._inotify.changed()
        if changed is None:
            self._unread = dict.fromkeys(self._files)
        else:
            self._unread.update((file, None) for number in changed if (file := self._watches.get(number)) is not None)

    def _follow(self, file: FollowedFile, now: float) -> None:
        """Forward a slice of a file; the rest follows after the other files."""
        if file.stream.backlog() >= BACKLOG:
            return
        del self._unread[file]
        left = SLICE
        for chunk in file.tail.chunks(now, self._buffer):
            file.stream.write_or_queue_chunk(chunk, now)
            left -= chunk.size()
            if chunk.ends and (left <= 0 or file.stream.backlog() >= BACKLOG):
                break
        if file.tail.has_unread():
            self._unread[file] = None
        elif file.tail.ended:
            for chunk in file.tail.finish(now, self._buffer):
                file.stream.write_or_queue_chunk(chunk, now)
            self._drop(file, now)

    def _show_unfinished(self, file: FollowedFile, now: float) -> None:
        file.stream.write_or_queue(file.tail.unfinished_line(), now)

    def _with_io_errors(self, file: FollowedFile, act: Callable[[FollowedFile, float], None], now: float) -> None:
        """Let an unreadable file (such as on a lost network disk) affect only its own output."""
        try:
            with self.sink.output_lock.hold():  # until a line ends
                act(file, now)
        except OSError as error:
            _logger.warning("a worker's log file cannot be read, so its output is no longer shown here: %s", error)
            self._drop(file, now)

    def _drop(self, file: FollowedFile, now: float) -> None:
        self._unread.pop(file, None)
        self._files.discard(file)
        if self._watches.pop(file.watch, None) is not None and self._inotify is not None:
            self._inotify.unwatch(file.watch)
        file.tail.close()
        line_filter, merger = file.shared
        if not any(file.shared) or any(other.shared == file.shared for other in self._files):
            return
        if line_filter is not None:
            line_filter.close()
        if merger is not None:
            self._mergers.discard(merger)
            with self.sink.output_lock.hold():
                merger.flush(now)

    # End of the thread

    def _close(self) -> None:
        with self._lock:
            self._open = False
            self._wakeup.close()
        for sources in (*self._ending, *(sources for _, sources in self._requests)):
            sources.close()
        if self._inotify is not None:
            self._inotify.close()
        self._poller.close()
        if self._stopping:
            self.sink.close()


def _open_channel(stream: ConsoleStream | None) -> tuple[int, int, bool]:
    """Open a non-blocking reading end and the worker's end, and say whether they are a pseudo-terminal."""
    if stream is not None and stream.fd is not None and os.isatty(stream.fd):
        with contextlib.suppress(OSError):  # no terminal is left, or this container has none
            return _open_terminal(stream)
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    # Do not change the default size, 64 KiB: a user can have 64 MiB of pipes, including those of data loaders, and
    # larger ones are no faster (260 MB of standard error take 2.6 to 3.3 s with both).
    return reading, writing, False


def _open_terminal(stream: ConsoleStream) -> tuple[int, int, bool]:
    import tty

    ours, workers = os.openpty()
    os.set_blocking(ours, False)
    tty.setraw(workers)  # the real terminal processes the output
    if stream.fd is not None:
        _copy_window_size(stream.fd, ours)
    return ours, workers, True


def _copy_window_size(source: int, target: int) -> None:
    import termios

    with contextlib.suppress(termios.error, OSError):
        size = termios.tcgetwinsize(source)
        if termios.tcgetwinsize(target) != size:
            termios.tcsetwinsize(target, size)
