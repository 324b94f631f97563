"""One thread that carries the output of the workers of one start to one place, and sleeps when there is none.

Laws:
- it waits in one place (epoll) for pipes, pseudo-terminals, news of followed files and calls from other threads;
- a source whose bytes wait for their turn is not read further, so memory stays bounded and the worker feels the
  console's pace, as it would without us;
- nothing that a console or a file does ends it before `stop`; whatever dead workers have left is then carried through;
- where a console is a pipe that nobody will read any more, its workers meet that too: the next time they write, as they
  would without us (EPIPE, and SIGPIPE where it is not ignored, as Python does).
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.log import get_logger
from rallypoint.logs.console import Chunk, ConsoleSink, ConsoleStream
from rallypoint.logs.relay import CAPACITY, Relay
from rallypoint.logs.tail import READ_SIZE, Tail

if TYPE_CHECKING:
    from rallypoint.base.inotify import Inotify
    from rallypoint.logs.line_filter import LineFilter

BACKLOG = 256 * 1024
"""A source with so many bytes waiting for their turn is not read further."""

SLICE = 1024 * 1024
"""Bytes of one followed file that are carried before the others are looked at."""

POLL = 0.1
"""Seconds between looks at followed files where the kernel cannot tell of changes."""

_logger = get_logger(__name__)


class Pump:
    """The thread, and all that it reads. It owns the reading ends, the files, the sieves and the place,
    and closes them.

    Args:
        place: where everything goes.
        relays: standard errors of workers, shown or only kept.
        tails: followed files with the path of each and where it is shown.
        sieves: what the tails write filtered lines to.
    """

    def __init__(
        self,
        place: ConsoleSink,
        relays: Iterable[Relay],
        tails: Iterable[tuple[Tail, str, ConsoleStream]],
        sieves: Iterable[LineFilter] = (),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._sink = place
        self._line_filters = list(sieves)
        self._clock = clock
        self._epoll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._closed = False
        self._lock = threading.Lock()  # for the two above and for calls after the end
        self._relays = set(relays)
        self._listening: dict[int, Relay] = {}
        self._streams: dict[Tail, ConsoleStream] = {}
        self._watches: dict[int, Tail] = {}
        self._unread_tails: dict[Tail, None] = {}  # files with news, in the order in which it came
        self._inotify: Inotify | None = None
        followed = list(tails)
        self._buffer = bytearray(READ_SIZE if followed else 0)
        self._pipes = self._watch_readers()
        self._add_tails(followed)
        self._epoll.register(self._wakeup, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="rallypoint-output", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Carry on what another thread has read from a relay. Safe from any thread, also after the end."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self._wakeup, 1)

    def stop(self) -> None:
        """Have it carry what is left, end the thread and close everything. Does not wait."""
        self._stopping = True
        self.wake()

    def join(self, seconds: float) -> bool:
        """Wait until `stop` has done its work.

        Returns whether that was within `seconds`. If not, a console that takes no bytes holds it up, and the thread
        goes on by itself.
        """
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _watch_readers(self) -> set[int]:
        """Have epoll tell of pipes that relays are shown on and nobody reads any more, which it does unasked."""
        shown = {relay.show.fd for relay in self._relays if relay.show is not None and relay.show.fd is not None}
        pipes = {fd for fd in shown if _is_pipe(fd)}
        for fd in pipes:
            self._epoll.register(fd, 0)
        return pipes

    def _add_tails(self, tails: list[tuple[Tail, str, ConsoleStream]]) -> None:
        for tail, _, show in tails:
            self._streams[tail] = show
            self._unread_tails[tail] = None
        if not tails:
            return
        from rallypoint.base.inotify import Inotify

        try:
            self._inotify = Inotify()
            self._watches = {self._inotify.watch(path): tail for tail, path, _ in tails}
        except OSError as error:
            _logger.warning("log files are looked at every %s s instead of at each write: %s", POLL, error)
            self._clear_inotify()
        else:
            self._epoll.register(self._inotify, select.EPOLLIN)

    def _clear_inotify(self) -> None:
        if self._inotify is not None:
            self._inotify.close()
        self._inotify = None
        self._watches = {}

    # The loop

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._run_once()
            self._finish()
        except Exception:
            _logger.exception("the output of workers can no longer be shown; this is a defect of Rallypoint")
        finally:
            self._close()

    def _run_once(self) -> None:
        self._listen()
        events = self._epoll.poll(self._timeout())
        now = self._clock.monotonic()
        with self._sink.output_lock.hold():
            self._sink.flush_due(now)
        for fd, _ in events:
            if (relay := self._listening.get(fd)) is not None:
                self._forward(relay, now)
            elif fd in self._pipes:
                self._nobody_reads(fd)
            elif fd == self._wakeup:
                os.eventfd_read(self._wakeup)
                for each in self._relays:
                    self._show(each, now)
            else:
                self._read_inotify()
        if self._streams and self._inotify is None:
            self._unread_tails = dict.fromkeys(self._streams)
        for tail in list(self._unread_tails):
            self._with_io_errors(tail, self._follow, now)
        for tail in list(self._streams):
            self._with_io_errors(tail, self._show_progress_bar, now)

    def _listen(self) -> None:
        """Wait for those relays whose bytes have somewhere to go."""
        for relay in self._relays:
            fd = relay.fileno()
            ready = relay.show is None or relay.show.backlog() < BACKLOG
            if ready and fd not in self._listening:
                self._epoll.register(fd, select.EPOLLIN)
                self._listening[fd] = relay
            elif not ready and fd in self._listening:
                self._epoll.unregister(fd)
                del self._listening[fd]

    def _timeout(self) -> float | None:
        if any(self._streams[tail].backlog() < BACKLOG for tail in self._unread_tails):
            return 0.0
        due = [bar for tail in self._streams if (bar := tail.progress_bar_deadline()) is not None]
        if (turn := self._sink.deadline()) is not None:
            due.append(turn)
        wait = max(0.0, min(due) - self._clock.monotonic()) if due else None
        if self._streams and self._inotify is None:
            return POLL if wait is None else min(POLL, wait)
        return wait

    def _forward(self, relay: Relay, now: float) -> None:
        goes_on = relay.read()
        relay.follow_window()
        self._show(relay, now)
        if not goes_on:
            self._close_relay(relay)

    def _nobody_reads(self, fd: int) -> None:
        """What its workers have written so far is kept for the report."""
        self._epoll.unregister(fd)
        self._pipes.discard(fd)
        for relay in [each for each in self._relays if each.show is not None and each.show.fd == fd]:
            relay.read(CAPACITY)
            self._close_relay(relay)

    def _close_relay(self, relay: Relay) -> None:
        if self._listening.pop(relay.fileno(), None) is not None:
            self._epoll.unregister(relay.fileno())
        self._relays.discard(relay)
        relay.close()

    def _show(self, relay: Relay, now: float) -> None:
        if relay.show is not None and (parts := relay.take_pending()):
            with self._sink.output_lock.hold():
                relay.show.write_or_queue_chunk(Chunk([*parts], parts[-1].endswith(b"\n")), now)

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
        """Carry a slice of a file; what is left of it comes after the others had their slice."""
        show = self._streams[tail]
        if show.backlog() >= BACKLOG:
            return
        del self._unread_tails[tail]
        left = SLICE
        for piece in tail.pieces(now, self._buffer):
            show.write_or_queue_chunk(piece, now)
            left -= piece.size()
            if piece.ends and (left <= 0 or show.backlog() >= BACKLOG):
                break
        if tail.has_unread():
            self._unread_tails[tail] = None

    def _show_progress_bar(self, tail: Tail, now: float) -> None:
        if (due := tail.progress_bar_deadline()) is not None and now >= due:
            self._streams[tail].write_or_queue(tail.progress_bar(), now)

    def _with_io_errors(self, tail: Tail, act: Callable[[Tail, float], None], now: float) -> None:
        """Let a file that can no longer be read (a lost network disk, say) cost its own output only."""
        try:
            with self._sink.output_lock.hold():  # until a line has ended
                act(tail, now)
        except OSError as error:
            _logger.warning("a worker's log file cannot be read, so its output is no longer shown here: %s", error)
            self._unread_tails.pop(tail, None)
            del self._streams[tail]
            self._watches = {number: each for number, each in self._watches.items() if each is not tail}
            with contextlib.suppress(OSError):
                tail.close()

    # The end

    def _finish(self) -> None:
        now = self._clock.monotonic()
        for relay in self._relays:
            relay.read(CAPACITY)
            self._show(relay, now)
        with self._sink.output_lock.hold():
            self._sink.flush()
        for tail in list(self._streams):
            self._with_io_errors(tail, self._write_rest, now)

    def _write_rest(self, tail: Tail, now: float) -> None:
        for piece in tail.finish(now, self._buffer):
            self._streams[tail].write(*piece.parts)

    def _close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self._wakeup)
        closers: list[Callable[[], None]] = [tail.close for tail in self._streams]
        closers += [relay.close for relay in self._relays]
        closers += [sieve.close for sieve in self._line_filters]
        closers += [self._clear_inotify, self._epoll.close, self._sink.close]
        for close in closers:
            close()


def _is_pipe(fd: int) -> bool:
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
