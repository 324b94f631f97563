"""A table and the connections through which it is used, whatever carries their bytes.

Everything here runs on one thread. The carrier (`polling`) hands in what has arrived by `Connection.serve` and then
calls `ServedTable.flush`, which writes what anybody has earned. Laws:

- replies wait in `outgoing`, in the order in which they were earned, until they are flushed: those to one piece of
  input leave in one write for each client, unless they are large;
- a client that does not read is not served: once the carrier has no room for its replies, its next request is looked
  at only when they have gone. Large values wait as references to what the table holds;
- bytes that break the protocol close their own connection, with one log line, after the replies earned before them.
  That holds for the greeting too: torch's server stays silent after a wrong one until more comes, ours closes at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from rallypoint.base.log import LimitedLines
from rallypoint.store.carrying import say_refusal
from rallypoint.store.decoder import Decoder, Readers
from rallypoint.store.errors import StoreProtocolError
from rallypoint.store.table import JOINED, Replies, Reply, Table

_BLOCK = 4096
"""Bytes of replies to one connection's requests that are written at once, to learn whether there is room for more."""


class ServedTable:
    """What the connections of one server share."""

    def __init__(self, lines: LimitedLines) -> None:
        self.lines = lines
        self.table: Table[Connection] = Table()
        self.readers: Readers[Replies[Connection]] = Readers(self.table.commands())
        self.connections: set[Connection] = set()
        self.outgoing: list[tuple[Connection, bytes]] = []

    def flush(self) -> None:
        """Write all replies that wait."""
        outgoing, self.outgoing = self.outgoing, []
        for connection, replies in outgoing:
            connection.write(replies)

    def close(self) -> None:
        """End all connections at once; what was not yet sent is dropped."""
        for connection in list(self.connections):
            connection.abort()


class Connection(ABC):
    """One client's connection to `served`; who carries its bytes makes the abstract methods."""

    __slots__ = ("_backlog", "_decoder", "_full", "_over", "_served")

    def __init__(self, served: ServedTable) -> None:
        self._served = served
        self._decoder = Decoder(served.readers, self)
        self._backlog: deque[bytes | memoryview] = deque()  # replies for which the carrier has no room
        self._full = False  # the carrier has no room
        self._over = False  # no more requests are taken

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

    def serve(self, data: bytes) -> None:
        """Execute the requests that these bytes make whole, as long as there is room for replies."""
        decoder = self._decoder
        no_room = self._full
        if no_room:
            decoder.feed(data)
            return
        mine = b""
        try:
            replies = decoder.take(data)
            while replies is not None:
                if isinstance(replies, bytes):
                    mine += replies
                    replies = ()
                if replies or len(mine) >= _BLOCK:
                    self._earn(mine, replies)
                    mine = b""
                    if self._full:
                        break
                replies = decoder.next()
        except StoreProtocolError as error:
            self._earn(mine, ())
            self._refuse(error)
        else:
            if mine:
                self._served.outgoing.append((self, mine))

    def leave(self) -> None:
        """Take no more requests and wait for nothing."""
        self._over = True
        self._served.table.forget(self)

    def _earn(self, mine: bytes, replies: Sequence[Reply[Connection]]) -> None:
        """Put replies in line, and write them if they are many bytes."""
        earned = _together([(self, mine), *replies])
        self._served.outgoing += earned
        if sum(len(reply) for _, reply in earned) >= _BLOCK:
            self._served.flush()

    def _refuse(self, error: StoreProtocolError) -> None:
        say_refusal(self._served.lines, self.peer(), error)
        self._served.flush()
        self.leave()
        self.finish()


def _together(replies: Sequence[Reply[Connection]]) -> list[Reply[Connection]]:
    """Neighbouring small replies to one client put together; large ones are not copied."""
    joined: list[Reply[Connection]] = []
    run: list[bytes] = []
    size = 0
    for number, (client, reply) in enumerate(replies, 1):
        run.append(reply)
        size += len(reply)
        following = replies[number] if number < len(replies) else None
        if following is None or following[0] is not client or size + len(following[1]) > JOINED:
            if size:
                joined.append((client, run[0] if len(run) == 1 else b"".join(run)))
            run, size = [], 0
    return joined
