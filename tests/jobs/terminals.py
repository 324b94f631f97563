"""Commands that run on a terminal of their own."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from tests.jobs.launching import TIMEOUT, Launcher

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>]")


def plain(raw: str) -> str:
    """What was written to a terminal, without what moves the cursor and changes colours."""
    return _ESCAPES.sub("", raw).replace("\r", "")


class Terminal:
    """A command, and all that it has written to its terminal."""

    def __init__(
        self, rallyrun: Launcher, command: list[str], columns: int = 80, env: Mapping[str, str] | None = None
    ) -> None:
        self._fd, terminal = os.openpty()
        self.resize(columns)
        environment = {
            name: value for name, value in rallyrun.environment().items() if name not in {"COLUMNS", "LINES"}
        }
        self._process = subprocess.Popen(
            command,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=environment | {"TERM": "xterm"} | dict(env or {}),
            cwd=rallyrun.folder,
            start_new_session=True,
        )
        os.close(terminal)
        self.pid = self._process.pid
        self._data = b""
        self._closing = False
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def resize(self, columns: int) -> None:
        """Give the terminal another width."""
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def _read(self) -> None:
        with suppress(OSError):  # EIO once nobody has it open
            while not self._closing and (data := os.read(self._fd, 65536)):
                with self._changed:
                    self._data += data
                    self._changed.notify_all()

    @property
    def raw(self) -> str:
        """All that was written."""
        return self._data.decode(errors="replace")

    @property
    def text(self) -> str:
        """The same without what moves the cursor and changes colours."""
        return plain(self.raw)

    def until(self, words: str, after: int = 0) -> int:
        """Wait until the text holds some words behind a place; returns the place behind them."""
        if not self.waits(lambda text: text.find(words, after) >= 0):
            raise AssertionError(f"the terminal is still without {words!r}:\n{self.text[after:]}")
        return self.text.find(words, after) + len(words)

    def waits(self, holds: Callable[[str], bool], timeout: float = TIMEOUT) -> bool:
        """Wait until something holds of the text; returns whether it does. `timeout` is in seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: holds(self.text), timeout)

    def write(self, keys: bytes) -> None:
        """Type."""
        os.write(self._fd, keys)

    def signal(self, number: int) -> None:
        """Send the command a signal."""
        self._process.send_signal(number)

    def disconnect(self) -> int:
        """Close the terminal, as an emulator does that ends, and wait for the command's end; returns the exit code."""
        self._closing = True
        os.write(self._fd, b"\n")  # whose echo wakes the reader
        self._reader.join(TIMEOUT)
        os.close(self._fd)
        return self._process.wait(TIMEOUT)

    def ends(self) -> int:
        """Wait for the end; returns the exit code."""
        try:
            code = self._process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise AssertionError(f"the command has not ended:\n{self.text[-2000:]}") from None
        self._reader.join(TIMEOUT)
        os.close(self._fd)
        return code
