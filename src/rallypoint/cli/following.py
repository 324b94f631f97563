"""`rallyctl status --watch`: follows a job until it ends, even if its control plane restarts.

On a terminal, each answer redraws the contents (`Screen`). Laws:

1. No line is wider than the terminal, and no more lines are drawn than fit.
2. The terminal is restored when the command ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TextIO

from rallypoint.base.errors import RallypointError
from rallypoint.base.log import colours_wanted, terminal_rewrites_lines
from rallypoint.cli.exit import OutputError, print_error
from rallypoint.control.client.dialing import DialTarget
from rallypoint.observe.status import ChangeLines, Line, OnScreen, clock_time, cut, drawing, status_fields
from rallypoint.observe.watching.client import WatcherSession, open_session
from rallypoint.observe.watching.messages import JobList, Snapshot, WatchRequest

if TYPE_CHECKING:
    from rallypoint.features.local_jobs import EndedJob

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "success": "1;32", "failure": "1;31"}
_TAKE, _GIVE_BACK = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Escape sequences that switch to the alternate screen without a cursor, and back."""


class Terminal:
    """Draws on the whole terminal, from the first drawing until `close`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._taken = False

    @property
    def size(self) -> os.terminal_size:
        try:
            return os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            return os.terminal_size((80, 24))

    def draw(self, lines: Sequence[Line]) -> None:
        width, height = self.size
        colours = colours_wanted()
        shown = [_styled(cut(line.text, width), line.style if colours else "") for line in lines[:height]]
        self._write(("" if self._taken else _TAKE) + "\x1b[H" + "\x1b[K\r\n".join(shown) + "\x1b[K\x1b[J")
        self._taken = True

    def close(self) -> None:
        if self._taken:
            self._taken = False
            self._write(_GIVE_BACK)

    def _write(self, text: str) -> None:
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()


def _styled(text: str, style: str) -> str:
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if style else text


class Screen:
    def __init__(self, terminal: Terminal | None = None) -> None:
        self._terminal = terminal or Terminal()
        self._snapshot: Snapshot | None = None
        self._at = 0.0
        self._note = ""

    def show(self, snapshot: Snapshot) -> None:
        self._snapshot, self._at = snapshot, time.time()
        self.redraw()

    def note(self, text: str) -> None:
        """Show a note about the screen itself, for example that it is out of date; empty for none."""
        self._note = text
        self.redraw()

    def redraw(self) -> None:
        """Draw the same contents again, for the current size of the terminal."""
        if self._snapshot is None:
            return
        width, height = self._terminal.size
        below = [Line(self._note, "yellow")] if self._note else []
        lines = drawing(self._snapshot, OnScreen(width, height - len(below), self._at))
        self._terminal.draw([*lines[: height - len(below)], *below])

    def close(self) -> None:
        self._terminal.close()


_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AWAY = 60.0
"""Seconds that a control plane may be unreachable after it was reached."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 2.0
"""Seconds between two connection attempts, at first and at most."""


class Lines:
    """Prints a line per change, for output other than a terminal."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._changes = ChangeLines()
        self._write = write

    def show(self, snapshot: Snapshot) -> None:
        for line in self._changes.lines(snapshot, time.time()):
            self._write(line)

    def note(self, text: str) -> None:
        if text:
            self._write(f"{clock_time(time.time())} {text}")

    def close(self) -> None: ...


class JsonLines(Lines):
    """Prints each change as one line of JSON; notes go to standard error."""

    _shown: tuple[str, int] | None = None

    def show(self, snapshot: Snapshot) -> None:
        if self._shown != (shown := (snapshot.incarnation, snapshot.changes)):
            self._shown = shown
            self._write(json.dumps(status_fields(snapshot, time.time())))

    def note(self, text: str) -> None:
        if text:
            self._shown = None  # another coordinator with the same name may start counting its changes again
            print_error(f"rallyctl: {text}")


Display = Screen | Lines


def display_for(as_json: bool, write: Callable[[str], None]) -> Display:
    """A live screen on a terminal that supports one; otherwise lines."""
    if as_json:
        return JsonLines(write)
    if not (sys.stdout.isatty() and terminal_rewrites_lines()):
        return Lines(write)
    return Screen()


class Follower:
    def __init__(
        self,
        targets: Callable[[], Sequence[DialTarget]],
        job: Callable[[], str],
        ended: Callable[[float], EndedJob | None],
        display: Display,
    ) -> None:
        """`targets` finds where the control plane may be, even after it was lost. Then `job` returns the id, empty for
        the only job. `ended` returns how the job ended after a given time, if it ended on this machine.
        """
        self._targets = targets
        self._job = job
        self._ended = ended
        self._began = time.time()
        self._display = display
        self._last: Snapshot | None = None
        self._lost_at = 0.0
        self._noted = False

    async def run(self) -> Snapshot | JobList | EndedJob:
        """Follow the job until it ends. Returns how it ended, or the list of jobs if there are several. Raises
        RallypointError: the control plane cannot be reached, or was lost.
        """
        pause = _FIRST_PAUSE
        with _TerminalSignals(self._display):
            while True:
                try:
                    return await self._follow()
                except OutputError:
                    raise
                except RallypointError as error:
                    if self._last is None:
                        raise
                    if (ended := await asyncio.to_thread(self._ended, self._began)) is not None:
                        return ended
                    pause = self._on_lost(error, pause)
                    await asyncio.sleep(pause)

    def _on_lost(self, error: Exception, pause: float) -> float:
        """Handle a silent control plane. Returns the seconds until the next attempt."""
        now = time.monotonic()
        if not self._noted:
            self._noted, self._lost_at, pause = True, now, _FIRST_PAUSE / 2
            self._display.note("the control plane is unreachable; reconnecting")
        if now - self._lost_at >= _AWAY:
            raise RallypointError(
                f"the control plane has been unreachable for {_AWAY:g} s ({error}); if the job is still running, see "
                "the log of one of its nodes"
            ) from None
        return min(2 * pause, _LONGEST_PAUSE)

    async def _follow(self) -> Snapshot | JobList:
        # On a thread, since this may ask etcd or the agents on this machine.
        where = await asyncio.to_thread(self._targets)
        async with await open_session(where, self._job() if self._last is None else self._last.job) as session:
            session.send(WatchRequest(after=0))
            return await self._listen(session)

    async def _listen(self, session: WatcherSession) -> Snapshot | JobList:
        while True:
            seen = await session.receive()
            if isinstance(seen, JobList) and self._last is None:
                return seen
            if not isinstance(seen, Snapshot):
                continue
            self.show(seen)
            if seen.detail:
                return seen
            session.send(WatchRequest(after=seen.changes))

    def show(self, seen: Snapshot) -> None:
        """Show an answer."""
        if self._noted:
            self._noted = False
            again = self._last is not None and self._last.incarnation == seen.incarnation
            self._display.note(f"the control plane is reachable again{'' if again else ' after a restart'}")
            self._display.note("")
        self._last = seen
        self._display.show(seen)


class _TerminalSignals:
    """Inside the block, redraw a display on the whole terminal when its size changes, and restore the terminal before
    a signal ends the process.
    """

    def __init__(self, display: Display) -> None:
        self._display = display
        self._redraw = display.redraw if isinstance(display, Screen) else None

    def __enter__(self) -> None:
        if self._redraw is not None:
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGWINCH, self._redraw)
            for number in _ENDINGS:
                loop.add_signal_handler(number, self._end_by, number)

    def __exit__(self, *_error: object) -> None:
        if self._redraw is not None:
            for number in (signal.SIGWINCH, *_ENDINGS):
                asyncio.get_running_loop().remove_signal_handler(number)

    def _end_by(self, number: int) -> None:
        self._display.close()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
