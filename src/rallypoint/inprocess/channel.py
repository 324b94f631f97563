"""The channel between an agent and a worker that can go on in the next round: files in the notice directory.

Laws:

1. `inprocess.<LOCAL_RANK>` is a FIFO; if it has a reader, this process can go on. It is created only then.
   It stays, without a reader, when the function has ended for good: so the agent knows that a process that replaces a
   failed or succeeded worker can go on, too.
2. The agent writes lines into it: `leave <ROUND>`, that round has ended; `enter <ROUND>`, a new one has begun, and its
   variables are in `round.<LOCAL_RANK>.json`.
3. The worker answers `leave` with an empty file `left.<LOCAL_RANK>.<ROUND>`.
4. One process speaks for a local rank: a FIFO that another process reads is left alone.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import NamedTuple

from rallypoint.base.private_files import make_private, open_regular
from rallypoint.notices import FIFO_PREFIX, LEFT_PREFIX, ROUND_PREFIX

LEAVE, ENTER = "leave", "enter"


class Order(NamedTuple):
    """An order from the agent: `verb` is LEAVE or ENTER."""

    verb: str
    round: int


class Channel:
    """This process's end of the channel."""

    def __init__(self, folder: str, rank: str) -> None:
        """Make the FIFO and open it; the agent does not see it before `announce`.

        Args:
            folder: for notices.
            rank: local rank.

        Raises:
            OSError: there is no space, the folder is not ours alone, a FIFO cannot be made, or another process reads
                that of this local rank.
        """
        self._folder, self._rank = folder, rank
        self._path = os.path.join(folder, FIFO_PREFIX + rank)
        self._rest = b""
        make_private(folder)
        _refuse_if_read(self._path)
        self._draft = os.path.join(folder, f".{FIFO_PREFIX}{rank}.{os.getpid()}")
        with suppress(FileNotFoundError):
            os.unlink(self._draft)
        os.mkfifo(self._draft, 0o600)
        try:
            # Opened for writing too, so that it never reaches its end; for appending, so that it is not taken for a
            # checkpoint being written.
            self.fd = os.open(self._draft, os.O_RDWR | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            os.unlink(self._draft)
            raise

    def announce(self) -> None:
        """Let the agent know that this process can go on."""
        os.rename(self._draft, self._path)

    def close(self) -> None:
        os.close(self.fd)

    def wake(self) -> None:
        """Make `fd` readable, from another thread."""
        with suppress(OSError):
            os.write(self.fd, b"\n")

    def orders(self) -> list[Order]:
        """The orders that have arrived, when `fd` is readable."""
        try:
            lines = (self._rest + os.read(self.fd, 4096)).split(b"\n")
        except BlockingIOError:
            return []
        self._rest = lines.pop()
        return [order for line in lines if (order := parse(line)) is not None]

    def tell_left(self, round_: int) -> None:
        """Tell the agent that this process has left that round, and waits for the next.

        Raises:
            OSError: the agent cannot be told.
        """
        path = os.path.join(self._folder, f"{LEFT_PREFIX}{self._rank}.{round_}")
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))

    def environment(self, round_: int) -> dict[str, str | None]:
        """The variables of that round; None for those to remove.

        Raises:
            OSError, ValueError, KeyError, TypeError: the file is missing or invalid.
        """
        path = os.path.join(self._folder, f"{ROUND_PREFIX}{self._rank}.json")
        with open(open_regular(path), encoding="utf-8") as file:
            found = json.load(file)
        if found["round"] != round_:
            raise ValueError(f"{path} is of round {found['round']!r}, not of {round_}")
        variables = found["environment"]
        if not all(isinstance(value, str | None) for value in variables.values()):
            raise ValueError(f"{path} has variables that are no text")
        return {str(name): value for name, value in variables.items()}


def parse(line: bytes) -> Order | None:
    """Parse one line from the agent; None if it is not a known order."""
    verb, _, number = line.decode("ascii", "replace").partition(" ")
    if verb in (LEAVE, ENTER) and number.isdecimal() and number.isascii():
        return Order(verb, int(number))
    return None


def _refuse_if_read(path: str) -> None:
    """Raises: FileExistsError: another process reads the FIFO."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC))
    except OSError:  # missing, or without a reader: left behind by a dead process
        return
    raise FileExistsError(f"another process of this local rank is resumable already: {path} has a reader")
