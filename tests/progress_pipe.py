"""The training example's progress, through a pipe that keeps the training from getting far ahead of its reader."""

from __future__ import annotations

import fcntl
import json
import os
import select
import time
from pathlib import Path
from typing import Any

_LINE = 1001
"""Bytes of a line of the example's progress, which are written at once."""
_TIMEOUT = 120.0
"""Seconds after which what does not come is given up."""


class ProgressPipe:
    """A named pipe for `--progress` of the example that has room for few lines, until it is released."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self.lines: list[dict[str, Any]] = []
        """What was read, in order."""
        self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, os.sysconf("SC_PAGE_SIZE"))

    def events(self, name: str, step: int = -1) -> list[dict[str, Any]]:
        """The lines of that event at that step or later, as far as they were read."""
        return [each for each in self.lines if each["event"] == name and each["step"] >= step]

    def until(self, name: str, step: int, what: str, times: int = 1) -> None:
        """Read until the workers have written of an event at that step or later, so many times, and no further."""
        deadline = time.monotonic() + _TIMEOUT
        waiting = select.poll()
        waiting.register(self._pipe, select.POLLIN)
        while len(self.events(name, step)) < times:
            left = deadline - time.monotonic()
            assert left > 0 and waiting.poll(1000 * left), f"after {_TIMEOUT:.0f} s still not: {what}"  # noqa: PT018
            self._read_line()

    def release(self) -> None:
        """From now on there is room for all that the workers may write yet."""
        fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, 1 << 20)

    def read_rest(self) -> None:
        """Read what is there."""
        waiting = select.poll()
        waiting.register(self._pipe, select.POLLIN)
        while waiting.poll(0):
            self._read_line()

    def close(self) -> None:
        """Read no more."""
        os.close(self._pipe)

    def _read_line(self) -> None:
        self.lines.append({"step": -1, **json.loads(os.read(self._pipe, _LINE))})
