"""Reads workers' output for `rallyctl logs`: log files, output that passes through this agent, or its own console if
that is a file.

Laws:

1. An answer never exceeds its maximum size. A follower gets the rest with the next answers, and nothing twice.
2. A follower gets whole lines; when an output or the agent ends, it gets the rest.
3. The positions of only a few followers are stored: a forgotten follower starts with the last lines again.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import NamedTuple

from rallypoint.agent.workers import WorkerController
from rallypoint.base.log import ranges
from rallypoint.base.private_files import open_regular
from rallypoint.control.protocol.messages import CollectRequested
from rallypoint.features.incidents import last_lines
from rallypoint.observe.worker_logs import CONSOLE, OVERHEAD, OVERHEAD_OF_PIECE, LogPiece, NodeLogs, encode_logs
from rallypoint.workers.logs.outputs import Relay

_LONGEST_WAIT, _LOOK_EVERY = 10.0, 0.2
"""Seconds until a follower is answered without news, and seconds between looks, only while there are followers."""
_MOST_FOLLOWERS = 8
_FINISH = 2.0
"""Seconds that the agent's end waits for the last answers."""
_LEAST_SHARE = 512
"""Minimum bytes of one output to read at a time."""
_NOT_HERE = (
    "some workers write to the console of their node, which is not a file; "
    "to see all of it here, start the job with --tee=3"
)

Read = Callable[[int | None, int], tuple[int, bytes]]
"""Called with a position (None: near the end) and the maximum bytes; returns the bytes and their position."""


class _Output(NamedTuple):
    rank: int
    key: tuple[object, ...]
    read: Read


class _Tail:
    """An output, and the position read so far."""

    def __init__(self, output: _Output, at: int | None) -> None:
        self.rank = output.rank
        self._read = output.read
        self._at = at

    def take(self, lines: int, most: int, *, whole: bool) -> bytes:
        """New output, or the last lines at first; with `whole`, without an unfinished line."""
        begin, data = self._read(self._at, most)
        if whole and (len(data) < most or b"\n" in data):
            data = data[: data.rfind(b"\n") + 1]
        is_first, self._at = self._at is None, begin + len(data)
        if not is_first:
            return data
        return last_lines(data if begin == 0 else data[data.find(b"\n") + 1 :], lines) if lines else b""


class OutputReader:
    """Answers requests for the logs of one node's workers."""

    def __init__(self, workers: WorkerController) -> None:
        self._workers = workers
        self._followers: OrderedDict[int, _Follower] = OrderedDict()
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def begin(self, request: CollectRequested) -> Callable[[], bytes]:
        """Look at the workers, on the loop's thread. Returns the function that reads their outputs on another
        thread.
        """
        found, notes = _outputs_of(self._workers, request.ranks)
        cursor = request.cursor
        if not cursor:
            return partial(_Follower().read, request, found, notes)
        follower = self._followers.setdefault(cursor, _Follower())
        self._followers.move_to_end(cursor)
        if len(self._followers) > _MOST_FOLLOWERS:
            self._followers.popitem(last=False)
        context = self._workers.pcontext
        return partial(self._follow, follower, request, found, notes, lambda: self._workers.pcontext is not context)

    def watch(self, thread: threading.Thread) -> None:
        """Register a reading thread, for which `close` waits."""
        self._threads = [*(running for running in self._threads if running.is_alive()), thread]

    def close(self) -> None:
        """Answer all followers: the workers are gone."""
        self._ended.set()
        until = monotonic() + _FINISH
        for thread in self._threads:
            thread.join(max(0.0, until - monotonic()))

    def _follow(
        self,
        follower: _Follower,
        request: CollectRequested,
        found: Sequence[_Output],
        notes: Sequence[str],
        has_changed: Callable[[], bool],
    ) -> bytes:
        until = monotonic() + _LONGEST_WAIT
        while True:
            ended = self._ended.is_set()
            over = ended or has_changed() or monotonic() >= until
            answer = follower.read(request, found, notes, ended=ended)
            if over or answer:
                return answer
            self._ended.wait(_LOOK_EVERY)


class _Follower:
    """The positions of one follower. `read` is called from one thread at a time."""

    def __init__(self) -> None:
        self._tails: dict[tuple[object, ...], _Tail] = {}
        self._lock = threading.Lock()
        self._begin: int | None = None
        """Where to start a new output: an output of a later start is read from its beginning."""
        self._told: Sequence[str] = ()

    def read(
        self, request: CollectRequested, found: Sequence[_Output], notes: Sequence[str], *, ended: bool = False
    ) -> bytes:
        """Encode the answer; empty if there is nothing new."""
        with self._lock:
            present = {stream.key for stream in found}
            for stream in found:
                self._tails.setdefault(stream.key, _Tail(stream, self._begin)).rank = stream.rank
            self._begin = 0
            unreadable: dict[str, list[int]] = {}
            pieces = list(self._pieces(request, set() if ended or not request.cursor else present, unreadable))
            notes = [*notes, *(_cannot_be_read(why, ranks) for why, ranks in unreadable.items())]
            self._tails = {key: tail for key, tail in self._tails.items() if key in present}
            new = [note for note in notes if note not in self._told]
            self._told = notes
        return encode_logs(NodeLogs(tuple(pieces), tuple(new))) if pieces or new else b""

    def _pieces(
        self, request: CollectRequested, growing: set[tuple[object, ...]], unreadable: dict[str, list[int]]
    ) -> Iterator[LogPiece]:
        left = request.most - OVERHEAD
        for number, key in enumerate(tuple(self._tails)):
            share = max(_LEAST_SHARE, left // (len(self._tails) - number) - OVERHEAD_OF_PIECE)
            if share + OVERHEAD_OF_PIECE > left:
                return
            tail = self._tails.pop(key)
            self._tails[key] = tail  # the last ones come first next time
            try:
                data = tail.take(request.lines, share, whole=key in growing)
            except OSError as error:
                unreadable.setdefault(error.strerror or str(error), []).append(tail.rank)
                continue
            if data:
                left -= len(data) + OVERHEAD_OF_PIECE
                yield LogPiece(tail.rank, data)


def _cannot_be_read(why: str, found: Sequence[int]) -> str:
    named = ranges({rank for rank in found if rank != CONSOLE})
    who = f"logs of rank{'' if len(set(found)) == 1 else 's'} {', '.join(named)}" if named else "the console of a node"
    return f"{who} cannot be read: {why}"


# Workers' outputs


def _outputs_of(workers: WorkerController, ranks: Sequence[int]) -> tuple[list[_Output], list[str]]:
    """The outputs of the workers with `ranks`, or of all workers if empty, and sentences about unreadable ones."""
    found: dict[tuple[object, ...], _Output] = {}
    notes: list[str] = []
    context = workers.pcontext
    for worker in workers.group.workers if context is not None else ():
        assert context is not None, "there are workers"
        if ranks and worker.global_rank not in ranks:
            continue
        for end, paths in enumerate((context.stdouts, context.stderrs)):
            path = paths.get(worker.local_rank, "")
            if path == os.devnull:
                continue
            if path:
                output = _Output(worker.global_rank, (path,), partial(_read_file, path))
            elif (console := _console(end)) is not None:
                output = console
            elif (relay := context.relay(worker.local_rank, end)) is not None:
                read = partial(_read_relayed, relay)
                output = _Output(worker.global_rank, (context, worker.local_rank, end), read)
            else:
                notes = [_NOT_HERE]
                continue
            found.setdefault(output.key, output)
    return list(found.values()), notes


def _console(end: int) -> _Output | None:
    """Our own standard output (0) or standard error (1), if it is a file."""
    descriptor = end + 1
    with suppress(OSError):
        seen = os.fstat(descriptor)
        if stat.S_ISREG(seen.st_mode):
            path = f"/proc/self/fd/{descriptor}"
            return _Output(CONSOLE, (seen.st_dev, seen.st_ino), partial(_read_file, path, open_file=_open_own))
    return None


def _open_own(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _read_file(
    path: str, at: int | None, most: int, *, open_file: Callable[[str], int] = open_regular
) -> tuple[int, bytes]:
    """Raises OSError."""
    with open(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        begin = max(0, size - most) if at is None else at if at <= size else 0  # it was truncated
        file.seek(begin)
        return begin, file.read(most)


def _read_relayed(relay: Relay, at: int | None, most: int) -> tuple[int, bytes]:
    begin, data = relay.since(at or 0)
    if at is None and len(data) > most:
        return begin + len(data) - most, data[-most:]
    return begin, data[:most]
