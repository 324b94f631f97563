"""What a terminal showed, and when. Pure.

Laws:

1. Two frames are never the same, nor nearer than `_INTERVAL`: what is between them is not seen anyway.
2. A stretch in which nothing but figures change is a wait. What exceeds `_WAIT` seconds of it is played `FAST` times as
   fast, and each frame says so: nothing is cut out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pyte
from docs.recording.cast import Cast

FAST = 8
_INTERVAL = 0.15
_WAIT = 4.0


class Run(NamedTuple):
    """Characters of one style, from a column on."""

    column: int
    text: str
    style: str
    """Names a colour of the terminal, or is empty, with "bold" before it where it is."""


Row = tuple[Run, ...]


class _Screen(pyte.Screen):
    """Which knows faint text too, and takes it for text of the colour that is used for the same."""

    def select_graphic_rendition(self, *attributes: int) -> None:
        super().select_graphic_rendition(*(90 if each == 2 else each for each in attributes))


class Frame(NamedTuple):
    """What is seen from a moment on."""

    at: float
    rows: tuple[Row, ...]
    fast: bool = False


def frames_of(cast: Cast) -> list[Frame]:
    """All frames of a session, in the time in which they are played."""
    return _played(_thinned(_shown(cast)))


def _shown(cast: Cast) -> Iterator[Frame]:
    """The terminal after each event."""
    screen = _Screen(cast.width, cast.height)
    stream = pyte.Stream(screen)
    rows: dict[int, Row] = {}
    for at, text in cast.events:
        screen.dirty.clear()
        stream.feed(text)
        for number in screen.dirty:
            rows[number] = _row([screen.buffer[number][column] for column in range(cast.width)])
        yield Frame(at, tuple(rows.get(number, ()) for number in range(cast.height)))


def _row(cells: Sequence[pyte.screens.Char]) -> Row:
    runs: list[Run] = []
    for column, cell in enumerate(cells):
        colour = "" if cell.fg == "default" else cell.fg
        style = f"{'bold ' if cell.bold else ''}{colour}".strip()
        if runs and runs[-1].style == style:
            runs[-1] = runs[-1]._replace(text=runs[-1].text + cell.data)
        else:
            runs.append(Run(column, cell.data, style))
    return tuple(run._replace(text=run.text.rstrip()) for run in runs if run.text.strip())


def _thinned(frames: Iterator[Frame]) -> list[Frame]:
    found: list[Frame] = []
    for at, rows, _ in frames:
        near = bool(found) and at - found[-1].at < _INTERVAL
        shown = Frame(found.pop().at if near else at, rows)
        if not found or rows != found[-1].rows:
            found.append(shown)
    return found


def _played(frames: Sequence[Frame]) -> list[Frame]:
    found: list[Frame] = []
    at = waited = shown = 0.0
    for place, frame in enumerate(frames):
        before = frames[place - 1] if place else frame
        took = frame.at - before.at
        waited = waited + took if _words(frame) == _words(before) else 0.0
        fast = waited > _WAIT
        at += took / FAST if fast else took
        if not fast or at - shown >= _INTERVAL:
            found.append(Frame(at, frame.rows, fast))
            shown = at
    return found


def _words(frame: Frame) -> list[str]:
    """What a frame shows besides figures."""
    return [re.sub(r"[\d.]+", "0", run.text) for row in frame.rows for run in row]
