"""A table and the connections through which it is used.

Everything here runs on one thread. `polling` hands in what has arrived by `StoreConnection.serve` and then calls
`ServedTable.flush`, which writes all replies. Laws:

- replies wait in `outgoing`, in the order in which they were made, until they are flushed: those to one piece of input
  leave in one write for each client, unless they are large;
- a client that does not read is not served: once the kernel has no room for its replies, its next request is looked at
  only when they were sent, and long replies are made no further. Large values wait as references to what the table
  holds;
- nobody has more than a time slice: whoever asks for more has the next one when all others had theirs, and until then
  nothing more is read from that client;
- bytes that break the protocol, or what goes beyond the guard's limits, close their own connection, with one log line,
  after the replies to the requests before them. So does a lack of memory. That holds for the greeting too: torch's
  server stays silent after a wrong one until more comes, ours closes at once.
"""

from __future__ import annotations

import select
import socket
import time
from collections import deque
from collections.abc import Sequence

from rallypoint.base.log import RateLimitedLog
from rallypoint.store.decoder import Decoder, OpcodeReaders
from rallypoint.store.errors import StoreProtocolError
from rallypoint.store.guard import StoreGuard
from rallypoint.store.refusals import Reason, refusal
from rallypoint.store.table import MERGE_LIMIT, Replies, Reply, Table, Work
from rallypoint.store.transport_context import log_refusal, peer_of

_BLOCK = 4096
"""Bytes of replies to one connection's requests that are written at once, to learn whether there is room for more."""
_SLICE = 128
"""Requests, or steps of long ones, of one connection before others have their turn."""
_SLICE_TIME = 0.001
"""Seconds that long ones have at most."""


IN, OUT = select.POLLIN, select.POLLOUT


class ServedTable:
    """What the connections of one server share."""

    def __init__(self, lines: RateLimitedLog, guard: StoreGuard) -> None:
        self.log_lines = lines
        self.guard = guard
        self.table: Table[StoreConnection] = Table(guard.value)
        self.readers: OpcodeReaders[Replies[StoreConnection] | Work[StoreConnection]] = OpcodeReaders(
            self.table.commands(), guard.request
        )
        self.poller = select.epoll()
        self.connections: dict[int, StoreConnection] = {}
        """By the descriptors of their sockets."""
        self.unvalidated: dict[StoreConnection, float] = {}
        """When those came who had not greeted when this was last looked at, the oldest first."""
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
                connection.refuse(refusal(Reason.NO_MEMORY))

    def close(self) -> None:
        """End all connections at once; what was not yet sent is dropped."""
        for connection in list(self.connections.values()):
            connection.abort()
        self.poller.close()


class StoreConnection:
    """One client's connection, on a socket of its own."""

    __slots__ = (
        *("_backlog", "_bytes", "_closed", "_decoder", "_full", "_keys", "_reading_stopped", "_send", "_served"),
        *("_watched", "_work", "busy", "receive", "socket"),
    )

    def __init__(self, client: socket.socket, served: ServedTable) -> None:
        self.socket = client
        self.receive = client.recv
        self.busy = False
        """Whether its slice was over before all was done."""
        self._send = client.send
        self._served = served
        self._decoder = Decoder(served.readers, self)
        self._backlog: deque[bytes | memoryview] = deque()  # replies for which the kernel has no room
        self._full = False  # the kernel has no room
        self._closed = False  # no more requests are taken
        self._reading_stopped = False  # it reads no replies any more
        self._work: Work[StoreConnection] | None = None  # what is left of a long request
        self._keys = self._bytes = 0  # by how much it has made the table larger
        self._watched = IN
        served.poller.register(client, IN)
        served.connections[client.fileno()] = self
        served.unvalidated[self] = time.monotonic()

    @property
    def validated(self) -> bool:
        """Whether it has greeted."""
        return self._decoder.validated

    def serve(self, data: bytes) -> None:
        """Execute the requests that these bytes make whole, as long as there is room for replies, for one slice."""
        if not self._closed:
            if self._full or self.busy:
                self._decoder.feed(data)
            else:
                self._serve_slice(data)
        if (self._watched != IN or self.busy) and self.socket.fileno() >= 0:
            self._watch(OUT if self._full else 0 if self.busy else IN)

    def _serve_slice(self, data: bytes) -> None:
        table = self._served.table
        keys, size = table.keys, table.bytes
        try:
            self._execute(data)
        except StoreProtocolError as error:
            self.refuse(error)
        except MemoryError:
            self.refuse(refusal(Reason.NO_MEMORY))
        else:
            if table.keys != keys or table.bytes != size:
                self._account(table.keys - keys, table.bytes - size)

    def _stop_reading(self) -> None:
        """Take no more requests and wait for nothing."""
        self._closed = True
        self.busy = False
        self._served.table.forget(self)
        if self._work is not None:
            self._work.close()
            self._work = None

    def refuse(self, error: StoreProtocolError) -> None:
        """Log why, and close the connection as soon as the replies that it is owed were sent."""
        if not self._closed:
            log_refusal(self._served.log_lines, peer_of(self.socket), error)
            self._stop_reading()
            self._served.flush()
            if not self._backlog:
                self.abort()

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
            self.refuse(refusal(Reason.KEYS_OF_ONE, self._keys, self._served.guard.keys))
        elif self._bytes > self._served.guard.bytes:
            self.refuse(refusal(Reason.BYTES_OF_ONE, self._bytes, self._served.guard.bytes))

    def _queue_replies(self, mine: bytes, replies: Sequence[Reply[StoreConnection]]) -> None:
        """Put replies in line, and write them if they are many bytes."""
        earned = _merge_replies([(self, mine), *replies])
        self._served.outgoing += earned
        if sum(len(reply) for _, reply in earned) >= _BLOCK:
            self._served.flush()

    def write(self, replies: bytes | memoryview) -> None:
        """Send bytes, or keep them in the backlog while there is no room."""
        if self._full:
            self._backlog.append(replies)
            return
        try:
            sent = self._send(replies)
        except BlockingIOError:
            sent = 0
        except OSError:  # it is closing, and reading will show it
            self._reading_stopped = True
            return
        if sent < len(replies):
            self._full = True
            self._backlog.appendleft(memoryview(replies)[sent:])
            self._watch(OUT)

    def resume(self) -> bool:
        """There is room again; whether it was enough for all that waited, so that requests can be served again."""
        self._full = False
        while self._backlog and not self._full:
            self.write(self._backlog.popleft())
        if self._full:
            return False
        if self._closed:
            self.abort()
            return False
        return True

    def abort(self) -> None:
        """Close the connection now."""
        self._stop_reading()
        self._backlog.clear()
        self._served.unvalidated.pop(self, None)
        if self._served.connections.pop(self.socket.fileno(), None) is not None:
            self._served.poller.unregister(self.socket)
            self.socket.close()

    def _watch(self, events: int) -> None:
        if events != self._watched:
            self._watched = events
            self._served.poller.modify(self.socket, events)


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
