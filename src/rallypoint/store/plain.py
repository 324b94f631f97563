"""The worker store in plain Python, for machines where the one in C could not be built, and as the reference in tests.

`Table` executes requests (contract section 9.3), `Decoder` parses a client's bytes into requests, and `PlainTransport`
serves connections. `Table` and `Decoder` are pure. Laws of the table:

- **Values** are bytes. A queue with the same name as a key is independent; it exists while it is not empty.
- **One outstanding wait for each client**: a later WAIT or BARRIER replaces an earlier one.
- **Any change of a key wakes all waiting clients**: a key once seen stays seen, even if it is deleted before the other
keys are set. COMPARE_SET wakes clients even if it stores nothing. A push wakes clients in the order of their arrival,
up to and including the first that misses no other key. (torch's server counts a later push to a client with a missing
key again, and ends its wait while a key is still missing.)
- **BARRIER is a number under a normal key**. An arrival below the world size wakes nobody, neither waiting clients nor
  earlier arrivals; an arrival at or above it wakes all.
- **Waiting clients are answered first**, then the client that woke them: one client can be both, and reads its replies
  in that order.
- **A client that left is dropped**, and gets no more replies.

Laws of the decoder:

- only arrived bytes are stored, and no memory is allocated because of a length: a length above the limits is refused as
soon as it is read;
- the work is linear in the bytes, however they are split;
- MULTI_SET becomes one SET per pair, as soon as the pair is complete; without pairs, it stays MULTI_SET.

Laws of the connections, which all belong to the store's one thread:

- a client that does not read is not served: once the kernel has no room for its replies, its next request waits until
they are sent. Waiting values are references into the table;
- a protocol violation, an exceeded limit of the guard, a lack of memory or an internal error closes only that
connection, with one log line, after the replies to earlier requests.

Only the store in C provides time slices, so that no client's request delays another's, and the guard's limits on one
connection's keys and bytes.

`HashStore` is the table behind a lock, for the threads of one process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, MutableSet, Sequence
from io import BytesIO
from itertools import islice
from math import inf
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from rallypoint.base.descriptors import connection_limit
from rallypoint.base.errors import UserError
from rallypoint.base.log import get_logger
from rallypoint.base.netlink import Peer, PeerUsers
from rallypoint.store.api import DEFAULT_TIMEOUT, Receive, RequestStore
from rallypoint.store.errors import StoreProtocolError
from rallypoint.store.transport import (
    NO_RESOURCES,
    SINGLE_ADDRESS_BITS,
    Network,
    TransportContext,
    log_refusal,
    networks,
    packed_address,
    peer_of,
    raise_descriptor_limit,
    set_options,
    shown_peers,
)
from rallypoint.store.wire import (
    CANCELLED,
    DONE,
    FIELDS,
    I64,
    MAGIC,
    MAX_KEY,
    MAX_KEYS,
    MAX_PAYLOAD,
    MISSING,
    U32,
    U64,
    Op,
    RefusalReason,
    check,
    refusal,
    strings,
)

if TYPE_CHECKING:
    from datetime import timedelta

log = get_logger(__name__)

C = TypeVar("C", bound=Hashable)
Replies: TypeAlias = list[tuple[C, bytes]]
"""Clients and the bytes to send, in the order of sending. One reply can have several consecutive pieces."""

MERGE_LIMIT = 4096
"""Maximum size of a value sent in one piece with its length; longer values are not copied."""

_COMMANDS: dict[int, str] = {op: op.name.lower() for op in Op if op is not Op.VALIDATE}
_NUMBER_TEXT = 4096
"""Bytes of a value to search for a number."""
_NUMBER = re.compile(rb"\s*+([+-]?)(?=[0-9])0*+([0-9]{0,19}+)(?![0-9])")
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1


class Table(Generic[C]):
    """One store's keys and queues, and its waiting clients. Clients are any hashable tokens.

    Each command takes a client and its request's fields, and returns all replies that it causes.

    Args:
        value_limit: maximum bytes to which APPEND can extend a value.
    """

    def __init__(self, value_limit: float = inf) -> None:
        self._value_limit = value_limit
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, deque[bytes]] = {}
        self.missing: dict[C, MutableSet[bytes]] = {}
        """Waiting clients, and the keys that each still misses."""
        self.lines: dict[bytes, dict[C, None]] = {}
        """Clients that are waiting for a key, in order of arrival."""

    def execute(self, client: C, op: Op, *fields: Any) -> Replies[C]:
        """Execute a client's request. Raises StoreProtocolError for ADD or BARRIER on a value that is not a number, or
        APPEND beyond the limit; then nothing has changed."""
        command: Callable[..., Replies[C]] = getattr(self, _COMMANDS[op])
        return command(client, *fields)

    def forget(self, client: C) -> None:
        for key in self.missing.pop(client, ()):
            self._leave(client, key)

    def set(self, _client: C, key: bytes, value: bytes) -> Replies[C]:
        self.values[key] = value
        return self._changed(key)

    def multi_set(self, client: C, pairs: Sequence[tuple[bytes, bytes]]) -> Replies[C]:
        return [reply for key, value in pairs for reply in self.set(client, key, value)]

    def append(self, _client: C, key: bytes, value: bytes) -> Replies[C]:
        present = self.values.get(key, b"")
        check(len(present) + len(value), self._value_limit, RefusalReason.GROWN_VALUE)
        self.values[key] = present + value
        return self._changed(key)

    def compare_set(self, client: C, key: bytes, expected: bytes, desired: bytes) -> Replies[C]:
        if self.values.get(key, b"") == expected:
            self.values[key] = desired
        # If the key is missing and a value was expected, the protocol returns the expected value.
        return [*self._changed(key), *_value(client, self.values.get(key, expected))]

    def get(self, client: C, key: bytes) -> Replies[C]:
        return _value(client, self.values.get(key, b""))

    def multi_get(self, client: C, keys: Sequence[bytes]) -> Replies[C]:
        return [piece for key in keys for piece in self.get(client, key)]

    def add(self, client: C, key: bytes, amount: int) -> Replies[C]:
        total = self._increase(key, amount)
        return [*self._changed(key), (client, I64.pack(total))]

    def check(self, client: C, keys: Sequence[bytes]) -> Replies[C]:
        return [(client, DONE if self._has_all(keys) else MISSING)]

    def wait(self, client: C, keys: Sequence[bytes]) -> Replies[C]:
        if self._has_all(keys):
            return [(client, DONE)]
        # Here a key with only a queue counts as missing, although a wait for it alone would end at once.
        self._begin_wait(client, {key for key in keys if key not in self.values})
        return []

    def cancel_wait(self, client: C) -> Replies[C]:
        self.forget(client)
        return [(client, CANCELLED)]

    def num_keys(self, client: C) -> Replies[C]:
        return [(client, I64.pack(len(self.values)))]

    def list_keys(self, client: C) -> Replies[C]:
        return [(client, strings(list(self.values)))]

    def delete_key(self, client: C, key: bytes) -> Replies[C]:
        return [(client, I64.pack(int(self.values.pop(key, None) is not None)))]

    def ping(self, client: C, nonce: int) -> Replies[C]:
        return [(client, U32.pack(nonce))]

    def queue_push(self, _client: C, key: bytes, value: bytes) -> Replies[C]:
        self.queues.setdefault(key, deque()).append(value)
        for waiting in list(self.lines.get(key, ())):
            self._leave(waiting, key)
            if self._has_now_all(waiting, key):
                return [(waiting, DONE)]
        return []

    def queue_pop(self, client: C, key: bytes) -> Replies[C]:
        queue = self.queues.get(key)
        if queue is None:
            return [(client, I64.pack(0))]
        length, value = len(queue), queue.popleft()
        if not queue:
            del self.queues[key]
        return [(client, I64.pack(length)), *_value(client, value)]

    def queue_len(self, client: C, key: bytes) -> Replies[C]:
        return [(client, I64.pack(len(self.queues.get(key, ()))))]

    def barrier(self, client: C, key: bytes, world_size: int) -> Replies[C]:
        if self._increase(key, 1) >= world_size:
            return [*self._changed(key), (client, DONE)]
        self._begin_wait(client, {key})
        return []

    def _increase(self, key: bytes, amount: int) -> int:
        total = amount + (_number(key, self.values[key]) if key in self.values else 0)
        if not _LOWEST <= total <= _HIGHEST:
            total = (total - _LOWEST) % (1 << 64) + _LOWEST
        self.values[key] = b"%d" % total
        return total

    def _has_all(self, keys: Sequence[bytes]) -> bool:
        return all(key in self.values or key in self.queues for key in keys)

    def _begin_wait(self, client: C, missing: MutableSet[bytes]) -> None:
        self.forget(client)
        self.missing[client] = missing
        for key in missing:
            self.lines.setdefault(key, {})[client] = None

    def _changed(self, key: bytes) -> Replies[C]:
        """Mark the key as seen for all clients that wait for it; return the replies to those that now miss none."""
        if key not in self.lines:
            return []
        return [(client, DONE) for client in self.lines.pop(key) if self._has_now_all(client, key)]

    def _has_now_all(self, client: C, key: bytes) -> bool:
        """Mark the key as seen for a client that left its line. Returns whether it was the last missing one."""
        missing = self.missing[client]
        missing.discard(key)
        if not missing:
            del self.missing[client]
        return not missing

    def _leave(self, client: C, key: bytes) -> None:
        line = self.lines[key]
        del line[client]
        if not line:
            del self.lines[key]


def _value(client: C, value: bytes) -> Replies[C]:
    length = U64.pack(len(value))
    return [(client, length + value)] if len(value) <= MERGE_LIMIT else [(client, length), (client, value)]


def _number(key: bytes, text: bytes) -> int:
    """The decimal number at the start of `text`, as C's strtoll reads it: blanks before, anything after."""
    match = _NUMBER.match(text[:_NUMBER_TEXT])
    if match is not None:
        number = int(match[1] + b"0" + match[2])
        if _LOWEST <= number <= _HIGHEST:
            return number
    raise refusal(RefusalReason.NO_NUMBER, first=text[:40], second=key[:200])


Request: TypeAlias = tuple[Op, tuple[Any, ...]]
"""An operation with the fields that `wire.FIELDS` lists."""
T = TypeVar("T")
_Parser: TypeAlias = Generator[Request | None, None, T]
"""Parses a part of the stream. Yields complete requests, and None whenever it needs more bytes."""


class Decoder:
    """Reads requests from one connection's bytes, which must begin with VALIDATE.

    Args:
        limit: maximum bytes stored of an incomplete request with many keys.
    """

    def __init__(self, limit: float = inf) -> None:
        self.greeted = False
        self._limit = limit
        self._data = bytearray()
        self._at = 0
        self._taken = 0  # bytes of the request being read
        self._parser = self._parse()

    def feed(self, data: bytes) -> None:
        self._data += data

    def next(self) -> Request | None:
        """The next complete request, or None until more bytes are fed. Raises StoreProtocolError if the bytes violate
        the protocol or its limits; then the decoder is unusable."""
        return next(self._parser)

    def close(self) -> None:
        self._parser.close()
        self._data.clear()

    def _parse(self) -> _Parser[None]:
        (first,) = yield from self._read_bytes(1)
        if first != Op.VALIDATE:
            raise self._refusal(RefusalReason.NO_GREETING)
        magic = yield from self._u32()
        if magic != MAGIC:
            raise refusal(RefusalReason.WRONG_MAGIC, magic, MAGIC)
        self.greeted = True
        while True:
            self._taken = 0
            (code,) = yield from self._read_bytes(1)
            if code == Op.VALIDATE:
                raise self._refusal(RefusalReason.GREETED_AGAIN)
            if code not in _COMMANDS:
                raise self._refusal(RefusalReason.UNKNOWN_OPCODE)
            op = Op(code)
            if op is Op.MULTI_SET:
                yield from self._pairs()
            else:
                yield op, (yield from self._fields(op))  # a variable would keep a large value alive

    def _fields(self, op: Op) -> _Parser[tuple[Any, ...]]:
        readers: dict[str, Callable[[], _Parser[Any]]] = {
            "key": self._key,
            "value": self._value,
            "keys": self._keys,
            "i64": self._i64,
            "u32": self._u32,
        }
        fields = []
        for kind in FIELDS[op]:
            fields.append((yield from readers[kind]()))  # noqa: PERF401 - a comprehension cannot yield
        return tuple(fields)

    def _read_bytes(self, size: int, limit: float = inf) -> _Parser[bytes]:
        while len(self._data) - self._at < size:
            if self._taken + size > limit:
                raise refusal(RefusalReason.LONG_REQUEST, self._taken + size, limit)
            del self._data[: self._at]  # an idle connection must not keep the last large value
            self._at = 0
            yield None
        start = self._at
        self._at += size
        self._taken += size
        return bytes(self._data[start : self._at])

    def _u32(self) -> _Parser[int]:
        return int(U32.unpack((yield from self._read_bytes(4)))[0])

    def _i64(self) -> _Parser[int]:
        return int(I64.unpack((yield from self._read_bytes(8)))[0])

    def _size(self, most: int, reason: RefusalReason, limit: float = inf) -> _Parser[int]:
        size = int(U64.unpack((yield from self._read_bytes(8, limit)))[0])
        check(size, most, reason)
        return size

    def _key(self, limit: float = inf) -> _Parser[bytes]:
        size = yield from self._size(MAX_KEY, RefusalReason.LONG_KEY, limit)
        return (yield from self._read_bytes(size, limit))

    def _value(self) -> _Parser[bytes]:
        size = yield from self._size(MAX_PAYLOAD, RefusalReason.LONG_VALUE)
        return (yield from self._read_bytes(size))

    def _keys(self) -> _Parser[list[bytes]]:
        count = yield from self._size(MAX_KEYS, RefusalReason.MANY_KEYS)
        keys = []
        for _ in range(count):
            keys.append((yield from self._key(self._limit)))  # noqa: PERF401 - a comprehension cannot yield
        return keys

    def _pairs(self) -> _Parser[None]:
        count = yield from self._size(MAX_KEYS, RefusalReason.MANY_KEYS)
        if not count:
            yield Op.MULTI_SET, ((),)
        for _ in range(count):
            yield Op.SET, ((yield from self._key()), (yield from self._value()))

    def _refusal(self, reason: RefusalReason) -> StoreProtocolError:
        return refusal(reason, first=bytes(self._data[self._at - 1 : self._at + 15]))


_READ_SIZE = 64 * 1024
_MAX_ACCEPTED = 256
_MAX_PIECES = 256
"""Maximum pieces per system call."""
_BLOCK = 64 * 1024
"""Bytes of replies to send to one client at once, to find out whether there is room for more."""


class _Connection:
    __slots__ = ("closing", "decoder", "full", "out", "size", "socket")

    def __init__(self, client: socket.socket, limit: int) -> None:
        self.socket = client
        self.decoder = Decoder(limit)
        self.out: deque[bytes | memoryview] = deque()
        self.size = 0
        """Bytes in `out`."""
        self.full = False
        """Whether the kernel has no room for more of `out`."""
        self.closing = False
        """Whether it is no longer served, and closes after `out` is sent."""

    def reply(self, piece: bytes) -> None:
        self.out.append(piece)
        self.size += len(piece)

    def send(self) -> None:
        self.full = False
        while self.out:
            try:
                sent = self.socket.sendmsg(list(islice(self.out, _MAX_PIECES)))
            except BlockingIOError:
                self.full = True
                return
            self.size -= sent
            while self.out and sent >= len(self.out[0]):
                sent -= len(self.out.popleft())
            if sent:
                self.out[0] = memoryview(self.out[0])[sent:]


class PlainTransport:
    """A store and the connections to it; see `transport.StoreTransport`."""

    def __init__(self, context: TransportContext) -> None:
        self._context = context
        self._guard = context.guard
        self._table: Table[_Connection] = Table(context.guard.value)
        self._selector = selectors.DefaultSelector()
        self._connections: dict[_Connection, None] = {}
        self._ungreeted: dict[_Connection, float] = {}
        """When each connection without a greeting (at the last check) arrived, oldest first."""
        self._owed: dict[_Connection, None] = {}
        """Connections with replies that the kernel does not have yet."""
        self._users = PeerUsers()
        self._descriptors = connection_limit()
        self._woken = False
        self._accept_again_at = inf
        self._full_house = False
        """Whether accepting pauses because the number of connections has reached the guard's limit."""
        self._note_peers(context.guard.peers)
        self._selector.register(context.wakeup_fd, selectors.EVENT_READ)
        if context.listener is not None:
            set_options(context.listener, context.guard)
            self._selector.register(context.listener, selectors.EVENT_READ)

    def serve(self) -> None:
        self._woken = False
        while not self._woken:
            self._poll(self._pause())

    def run_once(self) -> bool:
        return self._poll(0)

    def add_connection(self, client: socket.socket, data: bytes = b"") -> None:
        set_options(client, self._guard)
        connection = self._admit(client)
        if connection is not None and data:
            self._serve(connection, data)
            self._send_owed()

    def set_peers(self, peers: Sequence[str] | None) -> None:
        self._note_peers(peers)
        for connection in list(self._connections):
            if not self._is_peer(connection.socket):
                self._refuse(connection, refusal(RefusalReason.NOT_A_PEER, limit=shown_peers(peers)))
        self._send_owed()

    def close(self) -> None:
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()
        self._users.close()

    def release_memory(self) -> None:
        """Do nothing: the interpreter releases the memory."""

    def _poll(self, pause: float | None) -> bool:
        """Handle all ready connections, waiting at most `pause` seconds. Returns whether there were any."""
        events = self._selector.select(pause)
        for key, event in events:
            if isinstance(key.data, _Connection):
                self._on_ready(key.data, event)
            elif key.fd == self._context.wakeup_fd:
                os.read(key.fd, 4096)
                self._woken = True
            elif self._context.listener is not None:
                self._accept(self._context.listener)
        self._send_owed()
        self._run_timers()
        return bool(events)

    # One connection

    def _on_ready(self, connection: _Connection, event: int) -> None:
        data = b""
        if event & selectors.EVENT_READ:
            try:
                data = connection.socket.recv(_READ_SIZE)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._drop(connection)
                return
        else:  # there is room for replies again
            self._send(connection)
        self._serve(connection, data)

    def _serve(self, connection: _Connection, data: bytes) -> None:
        """Execute the requests that these bytes complete, while there is room for replies."""
        try:
            connection.decoder.feed(data)
            while not connection.full and not connection.closing:
                request = connection.decoder.next()
                if request is None:
                    break
                for client, reply in self._table.execute(connection, request[0], *request[1]):
                    client.reply(reply)
                    self._owed[client] = None
                if connection.size >= _BLOCK:
                    self._send(connection)
        except StoreProtocolError as error:
            self._refuse(connection, error)
        except MemoryError:
            self._refuse(connection, refusal(RefusalReason.NO_MEMORY))
        except Exception:
            log.exception("an internal error in the store ended the connection from %s", peer_of(connection.socket))
            self._drop(connection)

    def _send_owed(self) -> None:
        while self._owed:
            self._send(self._owed.popitem()[0])

    def _send(self, connection: _Connection) -> None:
        """Send pending replies. If there is no room, wait for it, and read nothing until then."""
        if connection not in self._connections:
            return
        was_full = connection.full
        try:
            connection.send()
        except OSError:
            self._drop(connection)
            return
        if connection.closing and not connection.full:
            self._drop(connection)
        elif connection.full is not was_full:
            events = selectors.EVENT_WRITE if connection.full else selectors.EVENT_READ
            self._selector.modify(connection.socket, events, connection)

    def _refuse(self, connection: _Connection, error: StoreProtocolError) -> None:
        """Log the reason, and close the connection after its replies are sent."""
        if not connection.closing:
            log_refusal(self._context.log_lines, peer_of(connection.socket), error)
            connection.closing = True
            self._table.forget(connection)
            self._owed[connection] = None

    def _drop(self, connection: _Connection) -> None:
        """Close the connection now. Idempotent."""
        if connection in self._connections:
            del self._connections[connection]
            connection.closing = True
            connection.decoder.close()
            self._table.forget(connection)
            self._ungreeted.pop(connection, None)
            self._owed.pop(connection, None)
            self._selector.unregister(connection.socket)
            connection.socket.close()

    # Admission

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_MAX_ACCEPTED):
            if 0 < self._guard.connections <= len(self._connections):
                self._pause_accepting(listener, 0)
                return
            try:
                client, _ = listener.accept()
            except OSError as error:
                if error.errno in NO_RESOURCES:
                    self._pause_accepting(listener, error.errno or 0)
                return
            client.setblocking(False)
            is_last = client.fileno() >= self._descriptors - 1
            self._admit(client)
            if is_last:
                self._pause_accepting(listener, errno.EMFILE)
                return

    def _admit(self, client: socket.socket) -> _Connection | None:
        if not self._is_peer(client):
            error = refusal(RefusalReason.NOT_A_PEER, limit=shown_peers(self._peers))
        elif self._guard.own_user and self._users.peer_of(client) is Peer.OTHER_USER:
            error = refusal(RefusalReason.OTHER_USER)
        else:
            connection = _Connection(client, self._guard.request)
            self._connections[connection] = None
            self._ungreeted[connection] = time.monotonic()
            self._selector.register(client, selectors.EVENT_READ, connection)
            return connection
        log_refusal(self._context.log_lines, peer_of(client), error)
        client.close()
        return None

    def _is_peer(self, client: socket.socket) -> bool:
        if self._networks is None or client.family not in {socket.AF_INET, socket.AF_INET6}:
            return True
        try:
            address = packed_address(client.getpeername()[0])
        except OSError:
            return True  # it already left; reading will show that
        return address in self._addresses or any(address in network for network in self._networks)

    def _note_peers(self, peers: Sequence[str] | None) -> None:
        allowed = networks(peers)
        self._peers = peers
        self._networks: list[Network] | None = None
        """The networks that may connect; None for all."""
        if allowed is not None:
            self._networks = [network for network in allowed if network.bits < SINGLE_ADDRESS_BITS]
        self._addresses = frozenset(network.address for network in allowed or () if network.bits == SINGLE_ADDRESS_BITS)

    def _pause_accepting(self, listener: socket.socket, error: int) -> None:
        """Pause accepting: resources are lacking or, with error 0, the limit of connections is reached."""
        before, self._descriptors = self._descriptors, raise_descriptor_limit(self._context, error, self._descriptors)
        if self._descriptors == before:  # otherwise waiting clients are reported again
            self._selector.unregister(listener)
            self._full_house = error == 0
            self._accept_again_at = time.monotonic() + self._context.retry

    # Time

    def _pause(self) -> float | None:
        """Seconds until work is due that no event reports."""
        at = self._accept_again_at
        if self._ungreeted and self._guard.validate_timeout:
            at = min(at, next(iter(self._ungreeted.values())) + self._guard.validate_timeout)
        return None if at == inf else max(0.0, at - time.monotonic())

    def _run_timers(self) -> None:
        now, limit = time.monotonic(), self._guard.validate_timeout
        while self._ungreeted:
            oldest, since = next(iter(self._ungreeted.items()))
            if not oldest.decoder.greeted and (not limit or now - since < limit):
                break
            del self._ungreeted[oldest]
            if not oldest.decoder.greeted:
                self._refuse(oldest, refusal(RefusalReason.SILENT, limit=limit))
        self._send_owed()
        if now >= self._accept_again_at or (self._full_house and len(self._connections) < self._guard.connections):
            self._resume_accepting(now)

    def _resume_accepting(self, now: float) -> None:
        """Accept again if a descriptor is free for it."""
        self._full_house = False
        self._accept_again_at = now + self._context.retry
        with contextlib.suppress(OSError):
            os.close(next_one := os.dup(self._context.wakeup_fd))
            if next_one < self._descriptors and self._context.listener is not None:
                self._selector.register(self._context.listener, selectors.EVENT_READ)
                self._accept_again_at = inf


class _Shared:
    """A table and its lock. Its clients are events; a reply sets the event."""

    def __init__(self) -> None:
        self.table: Table[threading.Event] = Table()
        self.lock = threading.Lock()

    def execute(self, client: threading.Event, op: Op, *fields: Any) -> bytes:
        """Return the replies to `client`, and set the events of other woken clients. Raises UserError for ADD on a
        value that is not a number."""
        mine = []
        with self.lock:
            try:
                replies = self.table.execute(client, op, *fields)
            except StoreProtocolError as error:
                raise UserError(str(error)) from None
            for target, reply in replies:
                target.set()
                if target is client:
                    mine.append(reply)
        return b"".join(mine)

    def forget(self, client: threading.Event) -> None:
        with self.lock:
            self.table.forget(client)


class HashStore(RequestStore):
    """A store in memory, for the threads of this process. Clones share the content."""

    def __init__(self, timeout: timedelta | float = DEFAULT_TIMEOUT, *, _shared: _Shared | None = None) -> None:
        super().__init__(timeout)
        self._shared = _shared or _Shared()

    def clone(self) -> HashStore:
        return HashStore(self._timeout, _shared=self._shared)

    def _title(self) -> str:
        return "this process's store"

    def _exchange(self, read: Callable[[Receive], T], op: Op, *fields: Any) -> T:
        return read(BytesIO(self._shared.execute(threading.Event(), op, *fields)).read)

    def _await(self, timeout: float, op: Op, *fields: Any) -> bool:
        event = threading.Event()
        try:
            self._shared.execute(event, op, *fields)
            event.wait(min(timeout, threading.TIMEOUT_MAX))
        finally:
            self._shared.forget(event)
        return event.is_set()  # checked last: it may have been set between the wait's end and its cancellation
