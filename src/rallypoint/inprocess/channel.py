"""How a worker that can go on in the next round, and its agent, reach each other: files in the folder for notices.

Laws:

1. `inprocess.<LOCAL_RANK>` is a FIFO; that it is read says that this process can go on, and it appears only then.
   It stays when the function has come out for good, without a reader: so the agent learns of workers that have failed
   or succeeded, too, that others in their place can go on.
2. The agent writes lines into it: `leave <ROUND>`, that round has ended; `enter <ROUND>`, a new one has begun, and its
   variables are in `round.<LOCAL_RANK>.json`.
3. An empty file `left.<LOCAL_RANK>.<ROUND>` answers `leave`.
4. One process speaks for a local rank: a FIFO that another process reads is left alone.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import NamedTuple

from rallypoint.notices import FIFO_PREFIX, LEFT_PREFIX, ROUND_PREFIX

LEAVE, ENTER = "leave", "enter"


class Order(NamedTuple):
    """What the agent says: `verb` is LEAVE or ENTER."""

    verb: str
    round: int


class Channel:
    """This process's end."""

    def __init__(self, folder: str, rank: str) -> None:
        """Make the FIFO and open it; nobody sees it before `announce`.

        Args: `folder`: for notices; `rank`: local rank.

        Raises:
            OSError: there is no room, no FIFO can be had, or another process reads that of this local rank.
        """
        self._folder, self._rank = folder, rank
        self._path = os.path.join(folder, FIFO_PREFIX + rank)
        self._rest = b""
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        _refuse_if_read(self._path)
        self._draft = os.path.join(folder, f".{FIFO_PREFIX}{rank}.{os.getpid()}")
        with suppress(FileNotFoundError):
            os.unlink(self._draft)
        os.mkfifo(self._draft, 0o600)
        try:
            # Opened to write too, it never comes to an end; to append, it is not taken for a checkpoint in the making.
            self.fd = os.open(self._draft, os.O_RDWR | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            os.unlink(self._draft)
            raise

    def announce(self) -> None:
        """From here on the agent knows that this process can go on."""
        os.rename(self._draft, self._path)

    def close(self) -> None:
        """Read no more."""
        os.close(self.fd)

    def wake(self) -> None:
        """Have `fd` be readable, from another thread."""
        with suppress(OSError):
            os.write(self.fd, b"\n")

    def orders(self) -> list[Order]:
        """What has come by now, when `fd` is readable."""
        try:
            lines = (self._rest + os.read(self.fd, 4096)).split(b"\n")
        except BlockingIOError:
            return []
        self._rest = lines.pop()
        return [order for line in lines if (order := parse(line)) is not None]

    def tell_left(self, round_: int) -> None:
        """This process is out of that round, and waits for the next.

        Raises:
            OSError: it cannot be told.
        """
        path = os.path.join(self._folder, f"{LEFT_PREFIX}{self._rank}.{round_}")
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))

    def environment(self, round_: int) -> dict[str, str | None]:
        """The variables of that round; None for those that are to go.

        Raises:
            OSError, ValueError, KeyError, TypeError: the file is not there, or not as it should be.
        """
        path = os.path.join(self._folder, f"{ROUND_PREFIX}{self._rank}.json")
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        if found["round"] != round_:
            raise ValueError(f"{path} is of round {found['round']!r}, not of {round_}")
        variables = found["environment"]
        if not all(isinstance(value, str | None) for value in variables.values()):
            raise ValueError(f"{path} has variables that are no text")
        return {str(name): value for name, value in variables.items()}


def parse(line: bytes) -> Order | None:
    """One line from the agent; None if it is none that is known."""
    verb, _, number = line.decode("ascii", "replace").partition(" ")
    if verb in (LEAVE, ENTER) and number.isdecimal() and number.isascii():
        return Order(verb, int(number))
    return None


def _refuse_if_read(path: str) -> None:
    """Raises: FileExistsError: another process reads the FIFO."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:  # not there, or nobody reads it: what a dead process has left
        return
    raise FileExistsError(f"another process of this local rank is resumable already: {path} has a reader")
