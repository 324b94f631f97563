"""A table and the connections through which it is used, whatever carries their bytes.

Everything here runs on one thread. The carrier (`polling`) hands in what has arrived by `StoreConnection.serve` and
then calls `ServedTable.flush`, which writes what anybody has earned. Laws:

- replies wait in `outgoing`, in the order in which they were earned, until they are flushed: those to one piece of
  input leave in one write for each client, unless they are large;
- a client that does not read is not served: once the carrier has no room for its replies, its next request is looked
  at only when they have gone, and long replies are made no further. Large values wait as references to what the table
  holds;
- nobody has more than a slice at a time: whoever asks for more has his next one when all others had theirs, and until
  then nothing more is read from him;
- bytes that break the protocol, or what goes beyond the guard's limits, close their own connection, with one log line,
  after the replies earned before them. So does a lack of memory. That holds for the greeting too: torch's server stays
  silent after a wrong one until more comes, ours closes at once.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from rallypoint.base.log import RateLimitedLog
from rallypoint.store.decoder import Decoder, OpcodeReaders
from rallypoint.store.errors import StoreProtocolError
from rallypoint.store.guard import StoreGuard, out_of_memory_error, too_many_bytes_error, too_many_keys_error
from rallypoint.store.table import MERGE_LIMIT, Replies, Reply, Table, Work
from rallypoint.store.transport import log_refusal

_BLOCK = 4096
"""Bytes of replies to one connection's requests that are written at once, to learn whether there is room for more."""
_SLICE = 128
"""Requests, or steps of long ones, of one connection before others have their turn."""
_SLICE_TIME = 0.001
"""Seconds that long ones have at most."""


class ServedTable:
    """What the connections of one server share."""

    def __init__(self, lines: RateLimitedLog, guard: StoreGuard) -> None:
        self.log_lines = lines
        self.guard = guard
        self.table: Table[StoreConnection] = Table(guard.value)
        self.readers: OpcodeReaders[Replies[StoreConnection] | Work[StoreConnection]] = OpcodeReaders(
            self.table.commands(), guard.request
        )
        self.connections: set[StoreConnection] = set()
        self.busy: deque[StoreConnection] = deque()
        """Those whose slice was over before all was done."""
        self.outgoing: list[tuple[StoreConnection, bytes]] = []

    def flush(self) -> None:
        """Write all replies that wait."""
        outgoing, self.outgoing = self.outgoing, []
        for connection, replies in outgoing:
            try:
                connection.write(replies)
            except MemoryError:
                connection.refuse(out_of_memory_error())

    def close(self) -> None:
        """End all connections at once; what was not yet sent is dropped."""
        for connection in list(self.connections):
            connection.abort()


class StoreConnection(ABC):
    """One client's connection to `served`; who carries its bytes makes the abstract methods."""

    __slots__ = (
        "_backlog",
        "_bytes",
        "_closed",
        "_decoder",
        "_full",
        "_keys",
        "_reading_stopped",
        "_served",
        "_work",
        "busy",
    )

    def __init__(self, served: ServedTable) -> None:
        self._served = served
        self._decoder = Decoder(served.readers, self)
        self._backlog: deque[bytes | memoryview] = deque()  # replies for which the carrier has no room
        self._full = False  # the carrier has no room
        self._closed = False  # no more requests are taken
        self._reading_stopped = False  # it reads no replies any more
        self._work: Work[StoreConnection] | None = None  # what is left of a long request
        self._keys = self._bytes = 0  # by how much it has made the table larger
        self.busy = False
        """Whether its slice was over before all was done."""

    @abstractmethod
    def write(self, replies: bytes) -> None:
        """Send bytes, or keep them in the backlog while there is no room."""

    @abstractmethod
    def finish(self) -> None:
        """Close the connection as soon as the backlog is empty."""

    @abstractmethod
    def abort(self) -> None:
        """Close the connection now."""

    @abstractmethod
    def peer(self) -> str:
        """Who is at the other end, for messages."""

    @property
    def validated(self) -> bool:
        """Whether it has greeted."""
        return self._decoder.validated

    def serve(self, data: bytes) -> None:
        """Execute the requests that these bytes make whole, as long as there is room for replies, for one slice."""
        if self._closed:
            return
        if self._full or self.busy:
            self._decoder.feed(data)
            return
        table = self._served.table
        keys, size = table.keys, table.bytes
        try:
            self._execute(data)
        except StoreProtocolError as error:
            self.refuse(error)
        except MemoryError:
            self.refuse(out_of_memory_error())
        else:
            if table.keys != keys or table.bytes != size:
                self._account(table.keys - keys, table.bytes - size)

    def stop_reading(self) -> None:
        """Take no more requests and wait for nothing."""
        self._closed = True
        self.busy = False
        self._served.table.forget(self)
        if self._work is not None:
            self._work.close()
            self._work = None

    def refuse(self, error: StoreProtocolError) -> None:
        """Tell why, and close the connection as soon as what it has earned has gone."""
        if not self._closed:
            log_refusal(self._served.log_lines, self.peer(), error)
            self.stop_reading()
            self._served.flush()
            self.finish()

    def _execute(self, data: bytes) -> None:
        decoder = self._decoder
        mine = b""
        steps = _SLICE
        end = 0.0
        try:
            replies = decoder.take(data) if self._work is None else self._step(data)
            while replies is not None:
                if isinstance(replies, bytes):
                    mine += replies
                elif isinstance(replies, list):
                    if replies:
                        self._queue_replies(mine, replies)
                        mine = b""
                else:
                    self._work = replies
                if len(mine) >= _BLOCK:
                    self._queue_replies(mine, ())
                    mine = b""
                steps -= 1
                if self._full or self._closed:
                    break
                if self._work is not None:
                    end = end or time.monotonic() + _SLICE_TIME
                    steps = steps if time.monotonic() < end else 0
                if not steps:
                    self.busy = True
                    self._served.busy.append(self)
                    break
                replies = decoder.next() if self._work is None else self._step(b"")
        finally:
            if mine:
                self._served.outgoing.append((self, mine))

    def _step(self, data: bytes) -> Replies[StoreConnection] | Work[StoreConnection] | None:
        """The next step of a long request, or what comes after it."""
        if data:
            self._decoder.feed(data)
        if self._work is not None and not self._reading_stopped:
            for replies in self._work:
                return replies
        self._work = None
        return self._decoder.next()

    def _account(self, keys: int, size: int) -> None:
        """It has made the table larger, or smaller."""
        self._keys = max(0, self._keys + keys)
        self._bytes = max(0, self._bytes + size)
        if self._keys > self._served.guard.keys:
            self.refuse(too_many_keys_error(self._keys, self._served.guard.keys))
        elif self._bytes > self._served.guard.bytes:
            self.refuse(too_many_bytes_error(self._bytes, self._served.guard.bytes))

    def _queue_replies(self, mine: bytes, replies: Sequence[Reply[StoreConnection]]) -> None:
        """Put replies in line, and write them if they are many bytes."""
        earned = _merge_replies([(self, mine), *replies])
        self._served.outgoing += earned
        if sum(len(reply) for _, reply in earned) >= _BLOCK:
            self._served.flush()


def _merge_replies(replies: Sequence[Reply[StoreConnection]]) -> list[Reply[StoreConnection]]:
    """Neighbouring small replies to one client put together; large ones are not copied."""
    joined: list[Reply[StoreConnection]] = []
    run: list[bytes] = []
    size = 0
    for number, (client, reply) in enumerate(replies, 1):
        run.append(reply)
        size += len(reply)
        following = replies[number] if number < len(replies) else None
        if following is None or following[0] is not client or size + len(following[1]) > MERGE_LIMIT:
            if size:
                joined.append((client, run[0] if len(run) == 1 else b"".join(run)))
            run, size = [], 0
    return joined
