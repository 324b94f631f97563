"""A terminal whose contents are redrawn after each change: `rallyctl status --watch`.

Laws:

1. No line is wider than the terminal, and no more lines are drawn than it has.
2. The terminal is given back as it was.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TextIO

from rallypoint.control.protocol.observation import Snapshot
from rallypoint.observe.status import Line, OnScreen, cut, drawing

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "success": "1;32", "failure": "1;31"}
_TAKE, _GIVE_BACK = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""To the alternate screen without a cursor, and back."""


class Terminal:
    """The whole of a terminal, from the first drawing until `close`."""

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
        colours = "NO_COLOR" not in os.environ
        shown = [_styled(cut(each.text, width), each.style if colours else "") for each in lines[:height]]
        self._write(("" if self._taken else _TAKE) + "\x1b[H" + "\x1b[K\r\n".join(shown) + "\x1b[K\x1b[J")
        self._taken = True

    def close(self) -> None:
        """Give the terminal back. Idempotent."""
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
    """A job on a terminal."""

    def __init__(self, terminal: Terminal | None = None) -> None:
        self._terminal = terminal or Terminal()
        self._snapshot: Snapshot | None = None
        self._at = 0.0
        self._note = ""

    def show(self, snapshot: Snapshot) -> None:
        self._snapshot, self._at = snapshot, time.time()
        self.redraw()

    def note(self, text: str) -> None:
        """Something to be said of the screen itself, such as that it is not up to date; empty for nothing."""
        self._note = text
        self.redraw()

    def redraw(self) -> None:
        """Show the same again, in the size that the terminal has now."""
        if self._snapshot is None:
            return
        width, height = self._terminal.size
        below = [Line(self._note, "yellow")] if self._note else []
        lines = drawing(self._snapshot, OnScreen(width, height - len(below), self._at))
        self._terminal.draw([*lines[: height - len(below)], *below])

    def close(self) -> None:
        """Give the terminal back as it was. Idempotent."""
        self._terminal.close()
