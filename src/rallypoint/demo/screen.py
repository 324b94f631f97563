"""The demo on a terminal: every run a bar, redrawn in place.

Laws:

1. `frame` is pure: what is known and the time in, lines out.
2. No line is wider than the terminal, and the frame not higher: else it could not be drawn over.
3. The cursor is given back, however the demo ends.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby

from rallypoint.base.errors import RallypointError
from rallypoint.base.light_typing import NamedTuple
from rallypoint.base.log import terminal_rewrites_lines
from rallypoint.demo.account import Account, Lines, Write
from rallypoint.demo.track import Phase, Track

_LEAST_WIDTH, _LEAST_HEIGHT = 60, 24
_NAME, _BAR = 8, 24
_INTERVAL = 0.1
"""Seconds between two drawings, as long as nothing but a step was finished."""
_LONG = 5.0
"""Seconds without a step that are worth a colour of their own."""
_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"

_CODES = {"bold": "1", "dim": "2", "red": "1;31", "green": "32", "yellow": "33", "cyan": "36", "": ""}
_TITLE = "A training job loses a worker, then a node, and goes on."

Span = tuple[str, str]
"""A style, a key of `_CODES`, and a text."""


class Part(NamedTuple):
    """One scenario, and its runs so far."""

    title: str
    tracks: tuple[Track, ...]


class Known(NamedTuple):
    """All that is shown."""

    parts: tuple[Part, ...] = ()
    command: str = ""
    last: str = ""
    """What has happened last."""
    summary: tuple[str, ...] = ()


def frame(known: Known, now: float) -> list[list[Span]]:
    """The lines to show, `now` seconds after the launcher of the run that is under way was started."""
    lines: list[list[Span]] = [[("bold", _TITLE)]]
    for part in known.parts:
        lines += [[], [("", part.title)], *(_row(track, now) for track in part.tracks)]
    if known.summary:
        return [*lines, [], *([("", line)] for line in known.summary)]
    return [*lines, [], [("dim", f"$ {known.command}")], [("dim", known.last)]]


def _row(track: Track, now: float) -> list[Span]:
    style, status = _status(track, now)
    return [
        ("", f"  {track.launcher:{_NAME}} "),
        *_bar(track),
        ("", f" {track.step:>3}/{track.steps} "),
        (style, status),
    ]


def _bar(track: Track) -> list[Span]:
    done = min(_BAR, track.step * _BAR // track.steps)
    broken = track.phase in (Phase.BROKEN, Phase.GIVEN_UP)
    cells: list[Span] = [("yellow" if broken else "green", "━")] * done + [("dim", "─")] * (_BAR - done)
    if track.killed is not None:
        cells[min(_BAR - 1, track.killed_at * _BAR // track.steps)] = ("red", "✗")
    return [(style, "".join(cell for _, cell in run)) for style, run in groupby(cells, key=lambda span: span[0])]


def _status(track: Track, now: float) -> Span:
    """What is said of a run beside its bar, and how."""
    on = "" if track.stopped is None else f"went on after {track.stopped:.2f} s"
    well = "yellow" if (track.stopped or 0.0) > _LONG else "green"
    since = 0.0 if track.killed is None else now - track.killed
    waited = 0.0 if track.killed is None or track.gave_up is None else track.gave_up - track.killed
    return {
        Phase.STARTING: ("dim", f"starting, {now:.1f} s"),
        Phase.TRAINING: (well, on) if on else ("", "training"),
        Phase.BROKEN: ("yellow", f"no step for {since:.1f} s"),
        Phase.FINISHED: (well, f"{on}, done" if on else f"done in {track.seconds or 0.0:.1f} s"),
        Phase.GIVEN_UP: ("red", f"no step for {waited:.0f} s, given up"),
    }[track.phase]


def drawn(lines: Sequence[Sequence[Span]], width: int, colours: bool) -> list[str]:
    """Lines as a terminal takes them, none of more than `width` columns."""
    return [_cut(spans, width, colours) for spans in lines]


def _cut(spans: Sequence[Span], width: int, colours: bool) -> str:
    left, found = width, ""
    for style, text in spans:
        shown = text if len(text) <= left else text[: max(0, left - 1)] + "…" * (left > 0)
        left -= len(shown)
        code = _CODES[style] if colours else ""
        found += f"\x1b[{code}m{shown}\x1b[0m" if code and shown else shown
    return found


class Screen:
    """Takes the lines of the terminal from where the cursor is."""

    live = True

    def __init__(self, write: Write) -> None:
        self._write = write
        self._known = Known()
        self._began = time.monotonic()
        self._drawn_at = 0.0
        self._lines: list[str] = []
        self._colours = "NO_COLOR" not in os.environ

    def part(self, title: str) -> None:
        self._know(self._known._replace(parts=(*self._known.parts, Part(title, ()))))

    def command(self, text: str) -> None:
        self._know(self._known._replace(command=text, last=""))

    def line(self, seconds: float, text: str) -> None:
        self._know(self._known._replace(last=f"{seconds:6.2f} s  {text}"))

    def show(self, track: Track) -> None:
        part = self._known.parts[-1]
        before = part.tracks[-1] if part.tracks and part.tracks[-1].launcher == track.launcher else None
        if before is None:
            self._began = time.monotonic()
        others = part.tracks if before is None else part.tracks[:-1]
        parts = (*self._known.parts[:-1], part._replace(tracks=(*others, track)))
        self._known = self._known._replace(parts=parts)
        self._draw(at_once=before is None or before.phase is not track.phase)

    def redraw(self) -> None:
        self._draw(at_once=False)

    def end(self, lines: list[str]) -> None:
        self._know(self._known._replace(summary=tuple(lines)))

    def close(self) -> None:
        """Leave what is shown where it is. Idempotent."""
        with suppress(RallypointError):  # the terminal is gone
            self._write(_SHOW)

    def _know(self, known: Known) -> None:
        self._known = known
        self._draw(at_once=True)

    def _draw(self, at_once: bool) -> None:
        now = time.monotonic()
        if not at_once and now - self._drawn_at < _INTERVAL:
            return
        self._drawn_at = now
        size = shutil.get_terminal_size()
        lines = drawn(frame(self._known, now - self._began), size.columns - 1, self._colours)
        before, self._lines = self._lines, lines[-(size.lines - 1) :]  # of a terminal that has been made smaller
        self._write(_HIDE + redrawing(before[-(size.lines - 1) :], self._lines))


def redrawing(before: Sequence[str], lines: Sequence[str]) -> str:
    """What a terminal takes to show lines in the place of others; the cursor stands below them, before and after."""
    same = [old == new for old, new in zip(before, lines, strict=False)]
    same += [False] * (len(lines) - len(same))
    up = f"\x1b[{len(before)}F" if before else ""
    return up + "".join("\n" if kept else f"{line}\x1b[K\n" for kept, line in zip(same, lines, strict=True)) + "\x1b[J"


@contextmanager
def account(write: Write) -> Iterator[Account]:
    """The form that standard output can show: bars on a terminal that is large enough, else lines."""
    if not _can_draw():
        yield Lines(write)
        return
    screen = Screen(write)
    try:
        yield screen
    finally:
        screen.close()


def _can_draw() -> bool:
    if not (sys.stdout.isatty() and terminal_rewrites_lines()):
        return False
    size = shutil.get_terminal_size()
    utf = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return utf and size.columns >= _LEAST_WIDTH and size.lines >= _LEAST_HEIGHT
