"""What a command writes to a terminal, and when: asciicast v2, the format of asciinema."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import shlex
import struct
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_TYPED, _ENTERED = 0.05, 0.7
"""Seconds from one character of the command to the next, and to what it writes: it is shown as if it were typed."""
_PROMPT = "$ "


class RecordingError(Exception):
    """The command has failed, or has taken too long."""


@dataclass(frozen=True)
class Cast:
    """A recorded session: size in columns and rows, title, command, and what was written, each with its second."""

    width: int
    height: int
    title: str
    command: str
    written: int
    """When: seconds since 1970."""
    events: Sequence[tuple[float, str]]

    def text(self) -> str:
        """As a file of asciinema."""
        header = {
            "version": 2,
            "width": self.width,
            "height": self.height,
            "timestamp": self.written,
            "title": self.title,
            "command": self.command,
            "env": {"TERM": "xterm-256color"},
        }
        lines = [header, *([round(at, 3), "o", data] for at, data in self.events)]
        return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def read_cast(path: Path) -> Cast:
    """A recorded session from its file."""
    header, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    events = [(at, data) for at, kind, data in lines if kind == "o"]
    return Cast(header["width"], header["height"], header["title"], header["command"], header["timestamp"], events)


def record(
    command: Sequence[str], size: tuple[int, int], title: str, timeout: float, env: Mapping[str, str] | None = None
) -> Cast:
    """Run a command on a terminal of its own until it ends.

    Args:
        command: program and arguments; it is shown as if it had been typed at a prompt.
        size: of the terminal, in columns and rows.
        title: for the file and the picture; says which version was recorded.
        timeout: seconds that it has.
        env: what it finds in its environment besides ours.

    Raises:
        RecordingError: it did not end with exit code 0 in time.
    """
    typed = shlex.join(command)
    events = [(0.0, _PROMPT), *((_ENTERED + _TYPED * place, each) for place, each in enumerate(typed))]
    pid, terminal = pty.fork()
    if pid == 0:
        _become(command, size, {**os.environ, **(env or {}), "TERM": "xterm-256color"})
    start = events[-1][0] + _ENTERED
    events.append((start, "\r\n"))
    began = time.monotonic()
    try:
        events += _written(terminal, began, start, timeout)
    except BaseException:
        os.kill(pid, 15)
        raise
    finally:
        os.close(terminal)
        _, status = os.waitpid(pid, 0)
    if status:
        raise RecordingError(f"{typed} ended with exit code {os.waitstatus_to_exitcode(status)}")
    return Cast(*size, title, typed, int(time.time()), events)


def _become(command: Sequence[str], size: tuple[int, int], env: Mapping[str, str]) -> None:
    """In the child: have the terminal's size before anything is written, and become the command."""
    try:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        os.execvpe(
            command[0], list(command), {name: value for name, value in env.items() if name not in {"LINES", "COLUMNS"}}
        )
    except OSError as error:
        print(error, file=sys.stderr, flush=True)
    finally:
        os._exit(127)


def _written(terminal: int, began: float, start: float, timeout: float) -> list[tuple[float, str]]:
    events: list[tuple[float, str]] = []
    rest = b""
    while True:
        left = began + timeout - time.monotonic()
        if left <= 0 or not select.select([terminal], [], [], left)[0]:
            raise RecordingError(f"the command has not ended within {timeout:.0f} s")
        try:
            data = os.read(terminal, 65536)
        except OSError:  # EIO: nobody has the terminal any more
            data = b""
        if not data:
            return events
        text, rest = _whole(rest + data)
        events.append((start + time.monotonic() - began, text))


def _whole(data: bytes) -> tuple[str, bytes]:
    """The text of the bytes, and those of a character that is not complete yet."""
    for cut in range(min(4, len(data) + 1)):
        try:
            return data[: len(data) - cut].decode(), data[len(data) - cut :]
        except UnicodeDecodeError:
            continue
    return data.decode(errors="replace"), b""
