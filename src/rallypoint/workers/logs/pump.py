"""A thread that forwards the output of the workers of one start to one sink, and sleeps while there is none.

Laws:
- it waits in one place for pipes, pseudo-terminals, changes of followed files and calls from other threads;
- a source whose bytes wait is not read further, so that memory stays bounded and the worker writes at the console's
  pace;
- nothing that a console or a file does ends it before `stop`; then the rest of dead workers' output is forwarded;
- if a console is a pipe without a reader, its workers get EPIPE (and SIGPIPE, unless they ignore it, as
  Python does) at their next write, as without us;
- any thread may read a relay: one that learns of a worker's death can read the rest before any other has.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import threading
import time
from collections.abc import Callable
from select import POLLIN

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.kernel import Wakeup, set_pipe_size
from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger
from rallypoint.workers.logs.console import Chunk, ConsoleSink, ConsoleStream, write_all
from rallypoint.workers.logs.tail import READ_SIZE, LineFilter, Tail

if TYPE_CHECKING:
    from rallypoint.base.inotify import Inotify
    from rallypoint.workers.logs.collapse import CollapsedStream, CollapsingSink

TAIL_SIZE = 64 * 1024
"""Bytes of a worker's standard error that are kept for the report."""

CAPACITY = 1024 * 1024
"""Size of the pipe, if the system allows it; also the most that a dead worker leaves unread."""

_MAX_LINE = 4 * 1024
"""Bytes of a line that are kept for the report."""

_CHUNK = 64 * 1024
_READ_SLICE = 4 * _CHUNK  # read at once, so that a fast worker wakes us less often

BACKLOG = 256 * 1024
"""A source with so many waiting bytes is not read further."""

SLICE = 1024 * 1024
"""Bytes of one followed file that are forwarded before the next file's."""

POLL = 0.1
"""Seconds between polls of followed files if there is no inotify."""

_logger = get_logger(__name__)


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
        self._streams: dict[Tail, ConsoleStream | CollapsedStream] = {}
        self.collapsing: list[CollapsingSink] = []
        """In which lines wait that are shown when it is due."""
        self._paths: list[tuple[str, Tail]] = []
        self._watches: dict[int, Tail] = {}
        self._unread_tails: dict[Tail, None] = {}  # in the order of their changes
        self._ended_tails: set[Tail] = set()
        self._buffer = bytearray()
        self._inotify: Inotify | None = None

    def add_tail(self, tail: Tail, path: str, stream: ConsoleStream | CollapsedStream) -> None:
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
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

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
            for collapsing in self.collapsing:
                collapsing.write_due(now)
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
        deadlines = [self._sink.scheduler.deadline(), *(each.deadline() for each in self.collapsing)]
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
            for collapsing in self.collapsing:
                collapsing.flush()
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
    set_pipe_size(writing, CAPACITY)
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
