"""Where people look: the agent's own standard output and standard error, as places that many workers write to.

Laws:
- the descriptors are duplicates, so that nobody can close or reuse them under us;
- where both lead to the same terminal, pipe or file, they share one turn (`turns.py`);
- a console that fails (closed, disk full) costs the bytes that could not be written, and nothing else.
"""

from __future__ import annotations

import fcntl
import os
import select

from rallypoint.logs.turns import PATIENCE, QUIET, Turns


class Show:
    """One worker's stream as it is seen on a console. Only one thread may write to the shows of a console.

    Args:
        turns: whose turn it is there.
        fd: the descriptor to write to; None if it is closed.
    """

    def __init__(self, turns: Turns[Show], fd: int | None) -> None:
        self._turns = turns
        self._fd = fd

    @property
    def fd(self) -> int | None:
        """The descriptor that is written to, for questions about the console; None if it is closed."""
        return self._fd

    def isatty(self) -> bool:
        """Whether a terminal shows it."""
        return self._fd is not None and os.isatty(self._fd)

    def offer(self, data: bytes, now: float) -> None:
        """Show `data` in its turn: at once, unless another stands in the middle of a line."""
        if data:
            write_all(self._turns.offer(self, data, now))

    def backlog(self) -> int:
        """Bytes that wait for their turn."""
        return self._turns.backlog(self)

    def write(self, data: bytes) -> None:
        """Write all of `data` now, waiting as long as the console makes us wait. Never raises."""
        if self._fd is None:
            return
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:  # somebody who shares the open file has made it non-blocking
                _wait_writable(self._fd)
            except OSError:
                return


class Console:
    """Two descriptors of this process, which need not be open: normally 1 and 2."""

    def __init__(self, stdout: int, stderr: int) -> None:
        self._out, self._err = _duplicate(stdout), _duplicate(stderr)
        places = 1 if _same_place(self._out, self._err) else 2
        self._turns = [Turns[Show](QUIET, PATIENCE) for _ in range(places)]

    def out(self) -> Show:
        """A new way to be seen on standard output."""
        return Show(self._turns[0], self._out)

    def err(self) -> Show:
        """A new way to be seen on standard error."""
        return Show(self._turns[-1], self._err)

    def tick(self, now: float) -> None:
        """Pass on turns whose time is over."""
        for turns in self._turns:
            write_all(turns.tick(now))

    def deadline(self) -> float | None:
        """When `tick` is due; None while nobody waits."""
        return min((due for turns in self._turns if (due := turns.deadline()) is not None), default=None)

    def flush(self) -> None:
        """Write whatever waits."""
        for turns in self._turns:
            write_all(turns.flush())

    def close(self) -> None:
        """Give the duplicates back. Idempotent."""
        for fd in (self._out, self._err):
            if fd is not None:
                os.close(fd)
        self._out = self._err = None


def write_all(pieces: list[tuple[Show, bytes]]) -> None:
    """Write what `Turns` has handed out, in order."""
    for show, data in pieces:
        show.write(data)


def _duplicate(fd: int) -> int | None:
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError:
        return None


def _same_place(one: int | None, other: int | None) -> bool:
    return one is not None and other is not None and os.path.sameopenfile(one, other)


def _wait_writable(fd: int) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    poller.poll()
