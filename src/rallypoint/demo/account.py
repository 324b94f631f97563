"""The output of the demo, and its plain form: a line for each event, for pipes, files and simple terminals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rallypoint.demo.track import Phase, Track

Write = Callable[[str], None]
"""Writes text to standard output, at once. Raises RallypointError if that cannot be written."""


class Account(Protocol):
    """Is told of all that happens; one for each form in which it is shown.

    Each method may raise RallypointError: nobody reads the account any more.
    """

    live: bool
    """Whether a person watches."""

    def part(self, title: str) -> None:
        """A part of the demo begins: one scenario, under each launcher in turn."""

    def command(self, text: str) -> None:
        """A launcher is started so."""

    def line(self, seconds: float, text: str) -> None:
        """Something has happened, so many seconds after the launcher was started."""

    def show(self, track: Track) -> None:
        """The run that is under way stands so."""

    def redraw(self) -> None:
        """Time has passed."""

    def end(self, lines: list[str]) -> None:
        """All runs are over; this is what to make of them."""


class Lines:
    """One line each, on standard output."""

    live = False

    def __init__(self, write: Write) -> None:
        self._write = write

    def part(self, title: str) -> None:
        self._write(f"\n{title}\n\n")

    def command(self, text: str) -> None:
        self._write(f"$ {text}\n")

    def line(self, seconds: float, text: str) -> None:
        self._write(f"  {seconds:6.2f} s  {text}\n")

    def show(self, track: Track) -> None:
        if track.phase is Phase.GIVEN_UP:
            self._write(f"            {track.launcher} {track.reason}\n")

    def redraw(self) -> None:
        pass

    def end(self, lines: list[str]) -> None:
        self._write("\n".join(["", *lines, ""]))
