"""The output of the demo, and its plain form: a line for each event, for pipes, files and simple terminals."""

from __future__ import annotations

from typing import Protocol

from rallypoint.demo.track import Phase, Track


class Account(Protocol):
    """Is told of all that happens; one for each form in which it is shown."""

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

    def part(self, title: str) -> None:
        print(f"\n{title}\n", flush=True)

    def command(self, text: str) -> None:
        print(f"$ {text}", flush=True)

    def line(self, seconds: float, text: str) -> None:
        print(f"  {seconds:6.2f} s  {text}", flush=True)

    def show(self, track: Track) -> None:
        if track.phase is Phase.GIVEN_UP:
            print(f"            {track.launcher} {track.reason}", flush=True)

    def redraw(self) -> None:
        pass

    def end(self, lines: list[str]) -> None:
        print("", *lines, sep="\n", flush=True)
