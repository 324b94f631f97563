"""The agent's side of the channel to workers that continue in the next round (`rallypoint.inprocess`).

The channel is the notice directory, with these files for the worker with each local rank:

    inprocess.<rank>     a FIFO, made and read by the worker: it can continue. Lines: `leave <round>`, `enter <round>`,
                         and `rank <rank>` to a standby worker, whose FIFO is then renamed
    left.<rank>.<round>  made by the worker: its function has ended, and it waits for `enter`
    round.<rank>.json    the environment of the round that it will enter
    prepared.<rank>      made by the worker: it has prepared its function

Laws:

1. The files are only hints: a worker counts as ready to continue only while its process is running, and the waiting
   stop ends one that does not answer. Files in a folder that is not private are ignored.
2. Nothing here waits for a worker or a full pipe.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping

from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger
from rallypoint.base.private_files import is_private, make_private, replace_file
from rallypoint.notices import ACK_PREFIX, FIFO_PREFIX, LEFT_PREFIX, PREPARED_PREFIX, PROGRESS_PREFIX, ROUND_PREFIX

if TYPE_CHECKING:
    from rallypoint.base.inotify import Inotify

log = get_logger(__name__)

POLL = 0.05
"""Seconds between looks at the folder if inotify is unavailable."""


class WorkerChannel:
    """The channel to all of one node's workers.

    Args:
        folder: the directory's path; empty for none.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def announced(self) -> set[int]:
        """Local ranks whose current or earlier worker announced that it can continue."""
        return {rank for rank, rest in self._entries(FIFO_PREFIX) if not rest}

    def left(self, round_: int) -> set[int]:
        """Local ranks of the workers that left this round."""
        return {rank for rank, rest in self._entries(LEFT_PREFIX) if rest == str(round_)}

    def prepared(self) -> set[int]:
        """Local ranks whose workers prepared their functions."""
        return {rank for rank, rest in self._entries(PREPARED_PREFIX) if not rest}

    def become(self, place: int, rank: int) -> bool:
        """Assign a standby worker a local rank in place of its temporary number. Returns whether this succeeded."""
        if not self._send(place, f"rank {rank}\n"):
            return False
        try:
            os.rename(*(os.path.join(self.folder, f"{FIFO_PREFIX}{owner}") for owner in (place, rank)))
        except OSError:
            return False
        return True

    def leave(self, rank: int, round_: int) -> bool:
        """Tell a worker that this round ended. Returns whether the worker is reading."""
        return self._send(rank, f"leave {round_}\n")

    def enter(self, rank: int, round_: int, environment: Mapping[str, str | None]) -> bool:
        """Tell a worker that a round begins. Returns whether the worker is reading.

        Args:
            rank: its local rank.
            round_: the round.
            environment: the variables that the agent sets; None for a variable that it no longer sets.
        """
        if not self.folder:
            return False
        import json

        path = os.path.join(self.folder, f"{ROUND_PREFIX}{rank}.json")
        try:
            make_private(self.folder)
            # Delete the old file first, since nobody reads it any more: ext4 writes a file to the disk before it
            # replaces another, which takes up to 0.8 s in every hundredth round, while others write.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            replace_file(path, json.dumps({"round": round_, "environment": dict(environment)}).encode())
        except OSError as error:
            log.warning("the worker with local rank %d cannot be notified of its round: %s", rank, error)
            return False
        return self._send(rank, f"enter {round_}\n")

    def remove(self, ranks: Collection[int]) -> None:
        """Remove all files written by or for workers with these local ranks."""
        for prefix in (FIFO_PREFIX, LEFT_PREFIX, ROUND_PREFIX, PREPARED_PREFIX, PROGRESS_PREFIX, ACK_PREFIX):
            for name in self._names(prefix, ranks):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self.folder, name))

    # Internals

    def _send(self, rank: int, line: str) -> bool:
        path = os.path.join(self.folder, f"{FIFO_PREFIX}{rank}")
        if not is_private(self.folder):
            return False
        try:
            fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # no reader: the process ended or can no longer continue
            return False
        try:
            return stat.S_ISFIFO(os.fstat(fd).st_mode) and os.write(fd, line.encode()) == len(line)
        except OSError:
            return False
        finally:
            os.close(fd)

    def _entries(self, prefix: str) -> Iterator[tuple[int, str]]:
        """The local rank and the rest of the name of each file with this prefix."""
        try:
            listing = os.listdir(self.folder) if self.folder and is_private(self.folder) else []
        except OSError:
            return
        for name in listing:
            rank, _, rest = name.removeprefix(prefix).partition(".")
            if name.startswith(prefix) and rank.isascii() and rank.isdecimal():
                yield int(rank), rest

    def _names(self, prefix: str, ranks: Collection[int]) -> Iterator[str]:
        for rank, rest in self._entries(prefix):
            if rank in ranks:
                yield f"{prefix}{rank}.{rest}" if rest else f"{prefix}{rank}"


class ReleasedWorkers:
    """Asks workers to leave a round, and tracks which of them received the request and which left. The `LeavingWorkers`
    of a stop.

    Args:
        channel: the channel to them.
        ranks: the local ranks to ask.
        round_: the round that ended.
    """

    def __init__(self, channel: WorkerChannel, ranks: Iterable[int], round_: int) -> None:
        self._channel = channel
        self._round = round_
        self._news = _watch(channel.folder)
        self.told = frozenset(rank for rank in ranks if channel.leave(rank, round_))

    def fds(self) -> list[int]:
        return [] if self._news is None else [self._news.fileno()]

    @property
    def must_be_polled(self) -> bool:
        """Whether no descriptor shows when workers leave."""
        return self._news is None

    def left(self) -> set[int]:
        """Notified workers that left the round."""
        if self._news is not None:
            self._news.changed()
        return self._channel.left(self._round) & self.told

    def close(self) -> None:
        news, self._news = self._news, None
        if news is not None:
            news.close()


def _watch(folder: str) -> Inotify | None:
    from rallypoint.base.inotify import CREATED, Inotify

    news = None
    try:
        news = Inotify()
        news.watch(folder, CREATED)
    except OSError as error:
        log.warning(
            "the workers' folder cannot be watched, so the agent checks every %s s for workers that leave a round: %s",
            POLL,
            error,
        )
        if news is not None:
            news.close()
        return None
    return news
