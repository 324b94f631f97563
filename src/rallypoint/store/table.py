"""What the requests mean: keys, queues, waiters and barriers (contract section 9.3).

Pure. A command takes a client (any hashable token) and the fields of its request, and returns the replies to send,
some of which may be for other clients. Laws:

- **Keys** hold bytes. A queue of the same name is another thing; it exists while it is not empty.
- **One outstanding wait for each client**: a later WAIT or BARRIER takes the place of an earlier one. A client counts
  the keys that it still misses; a key named twice counts twice. It gets DONE when the count reaches zero, once.
- **A change of a key wakes all who wait for it**, whatever the change: what was seen set stays seen, even if it is
  deleted before the rest has come. COMPARE_SET wakes them also when it stores nothing. A push wakes, in the order in
  which they came, those for whom this was one key of several, up to and including the first who has now got all.
  (Torch's server counts a later push to such a client once more, and ends its wait while a key is still missing.)
- **BARRIER is a number under a normal key**. Arriving at less than the world size wakes nobody, neither waiters nor
  earlier arrivals; arriving at the world size or beyond wakes all.
- **Waiters are answered first**, then who has woken them: a client can do both, and reads its replies in that order.
- **Whoever has left is forgotten**, and gets no more replies.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, TypeAlias, TypeVar

from rallypoint.store import wire
from rallypoint.store.errors import StoreProtocolError
from rallypoint.store.wire import CANCELLED, DONE, I64, MISSING, U32, U64, Op

C = TypeVar("C", bound=Hashable)
Reply: TypeAlias = tuple[C, bytes]
"""Who gets which bytes."""
Replies: TypeAlias = bytes | Sequence[Reply[C]]
"""All replies that a command earns, in the order in which they must be sent. Just bytes, perhaps none, are for the
asker alone: nearly every command ends so, and the server's speed lives on it."""

JOINED = 64 * 1024
"""Bytes up to which a value travels in one piece with its length; a longer one is not copied."""

_NUMBER = re.compile(rb"\s*+([+-]?)(?=[0-9])0*+([0-9]{0,19}+)(?![0-9])")
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1
_NOTHING = b""


class Table(Generic[C]):
    """The keys and queues of one store, and who waits for them."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes | bytearray] = {}  # a bytearray while it is appended to, until it is read
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waiting: dict[
            bytes, dict[C, int]
        ] = {}  # who waits for a key, first come first, and how often it is named
        self._missing: dict[C, int] = {}  # how many keys a waiter still misses
        self._awaited: dict[C, Sequence[bytes]] = {}  # the keys that a waiter named

    def commands(self) -> Mapping[Op, Callable[..., Replies[C]]]:
        """What to call for each opcode, with the client and the fields of the request."""
        return {
            Op.SET: self.set,
            Op.COMPARE_SET: self.compare_set,
            Op.GET: self.get,
            Op.ADD: self.add,
            Op.CHECK: self.check,
            Op.WAIT: self.wait,
            Op.NUM_KEYS: self.num_keys,
            Op.DELETE_KEY: self.delete_key,
            Op.APPEND: self.append,
            Op.MULTI_GET: self.multi_get,
            Op.MULTI_SET: self.multi_set,
            Op.CANCEL_WAIT: self.cancel_wait,
            Op.PING: self.ping,
            Op.QUEUE_PUSH: self.queue_push,
            Op.QUEUE_POP: self.queue_pop,
            Op.QUEUE_LEN: self.queue_len,
            Op.LIST_KEYS: self.list_keys,
            Op.BARRIER: self.barrier,
        }

    def execute(self, client: C, request: wire.Request) -> Sequence[Reply[C]]:
        """Do what `client` asks for by a typed request.

        Raises:
            StoreProtocolError: ADD or BARRIER on a value that is no number. Nothing is changed.
        """
        replies = self.commands()[wire.opcode(request)](client, *request)
        return [reply for reply in _listed(client, replies) if reply[1]]

    def forget(self, client: C) -> None:
        """The client has left, or no longer waits."""
        if self._missing.pop(client, None) is None:
            return
        for key in self._awaited.pop(client):
            line = self._waiting.get(key)
            if line is not None and line.pop(client, None) is not None and not line:
                del self._waiting[key]

    def set(self, _client: C, key: bytes, value: bytes) -> Replies[C]:
        """Store a value. No reply."""
        self._values[key] = value
        return self._wake(key) if key in self._waiting else _NOTHING

    def multi_set(self, client: C, pairs: Sequence[tuple[bytes, bytes]]) -> Replies[C]:
        """Store several values. No reply."""
        return [reply for key, value in pairs for reply in _listed(client, self.set(client, key, value))]

    def append(self, _client: C, key: bytes, value: bytes) -> Replies[C]:
        """Lengthen a value. No reply."""
        present = self._values.get(key, b"")
        if isinstance(present, bytes):
            present = self._values[key] = bytearray(present)
        present += value
        return self._wake(key)

    def compare_set(self, client: C, key: bytes, expected: bytes, desired: bytes) -> Replies[C]:
        """Store `desired` if the present value is `expected`. The reply is the value that is now there."""
        present = self._read(key)
        if expected == (present or b""):
            present = self._values[key] = desired
        # Where the key is missing and something was expected, the protocol gives back what was expected.
        reply = _value(client, expected if present is None else present)
        return [*self._wake(key), *_listed(client, reply)] if key in self._waiting else reply

    def get(self, client: C, key: bytes) -> Replies[C]:
        """The reply is the value, empty if there is none."""
        value = self._values.get(key, b"")
        if len(value) <= JOINED:
            return U64.pack(len(value)) + value
        return _value(client, self._read(key) or b"")

    def multi_get(self, client: C, keys: Sequence[bytes]) -> Replies[C]:
        """The reply is one value for each key, empty where there is none."""
        return [piece for key in keys for piece in _listed(client, self.get(client, key))]

    def add(self, client: C, key: bytes, delta: int) -> Replies[C]:
        """Add to a number. The reply is the sum. Raises StoreProtocolError if there is a value that is no number."""
        reply = I64.pack(self._increase(key, delta))
        return [*self._wake(key), (client, reply)] if key in self._waiting else reply

    def check(self, _client: C, keys: Sequence[bytes]) -> Replies[C]:
        """The reply tells whether all keys are there, as values or as queues."""
        return DONE if self._has_all(keys) else MISSING

    def wait(self, client: C, keys: Sequence[bytes]) -> Replies[C]:
        """The reply comes when all keys are there."""
        if self._has_all(keys):
            return DONE
        # A key that has only a queue counts as missing here, although a wait for it alone would be over at once.
        self._enlist(client, [key for key in keys if key not in self._values])
        return _NOTHING

    def cancel_wait(self, client: C) -> Replies[C]:
        """Wait no longer."""
        self.forget(client)
        return CANCELLED

    def num_keys(self, _client: C) -> Replies[C]:
        """The reply is the number of values."""
        return I64.pack(len(self._values))

    def list_keys(self, _client: C) -> Replies[C]:
        """The reply is the names of all values."""
        return wire.strings(list(self._values))

    def delete_key(self, _client: C, key: bytes) -> Replies[C]:
        """Remove a value; a queue of that name stays. The reply tells whether it was there."""
        return I64.pack(0 if self._values.pop(key, None) is None else 1)

    def ping(self, _client: C, nonce: int) -> Replies[C]:
        """The reply is the nonce."""
        return U32.pack(nonce)

    def queue_push(self, _client: C, key: bytes, value: bytes) -> Replies[C]:
        """Put a value at the end of a queue. No reply."""
        self._queues.setdefault(key, deque()).append(value)
        return self._wake_first(key)

    def queue_pop(self, client: C, key: bytes) -> Replies[C]:
        """The reply is the length before, and if that is not 0 the oldest value, which is then gone."""
        queue = self._queues.get(key)
        if queue is None:
            return I64.pack(0)
        length = I64.pack(len(queue))
        value = queue.popleft()
        if not queue:
            del self._queues[key]
        return [(client, length), *_listed(client, _value(client, value))]

    def queue_len(self, _client: C, key: bytes) -> Replies[C]:
        """The reply is the length of a queue."""
        return I64.pack(len(self._queues.get(key, ())))

    def barrier(self, client: C, key: bytes, world_size: int) -> Replies[C]:
        """The reply comes when `world_size` have arrived. Raises StoreProtocolError if the value is no number."""
        if self._increase(key, 1) >= world_size:
            return [*self._wake(key), (client, DONE)]
        self._enlist(client, [key])
        return _NOTHING

    def _read(self, key: bytes) -> bytes | None:
        value = self._values.get(key)
        if isinstance(value, bytearray):  # replies may be on their way for long: they need a value that stays as it is
            value = self._values[key] = bytes(value)
        return value

    def _increase(self, key: bytes, delta: int) -> int:
        present = self._values.get(key, b"0")
        total = delta + (int(present) if present.isdigit() and len(present) < 19 else _number(key, present))
        if not _LOWEST <= total <= _HIGHEST:
            total = (total - _LOWEST) % (1 << 64) + _LOWEST
        self._values[key] = b"%d" % total
        return total

    def _has_all(self, keys: Sequence[bytes]) -> bool:
        values, queues = self._values, self._queues
        for key in keys:  # noqa: SIM110 - a loop takes half the time of all() here, and this runs for every WAIT
            if key not in values and key not in queues:
                return False
        return True

    def _enlist(self, client: C, keys: Sequence[bytes]) -> None:
        self.forget(client)
        self._missing[client] = len(keys)
        self._awaited[client] = keys
        for key in keys:
            line = self._waiting.setdefault(key, {})
            line[client] = line.get(client, 0) + 1

    def _wake(self, key: bytes) -> list[Reply[C]]:
        """The key has changed: whoever waited for it misses it no longer."""
        line = self._waiting.pop(key, {})
        return [(client, DONE) for client, times in line.items() if self._found(client, times)]

    def _wake_first(self, key: bytes) -> list[Reply[C]]:
        """The queue has grown: serve those who wait in order, until one has got all that he waited for."""
        line = self._waiting.get(key, {})
        for client, times in list(line.items()):
            del line[client]
            if not line:
                del self._waiting[key]
            if self._found(client, times):
                return [(client, DONE)]
        return []

    def _found(self, client: C, times: int) -> bool:
        self._missing[client] -= times
        if self._missing[client]:
            return False
        del self._missing[client], self._awaited[client]
        return True


def _listed(client: C, replies: Replies[C]) -> Sequence[Reply[C]]:
    return [(client, replies)] if isinstance(replies, bytes) else replies


def _value(client: C, value: bytes) -> Replies[C]:
    length = U64.pack(len(value))
    return length + value if len(value) <= JOINED else [(client, length), (client, value)]


def _number(key: bytes, text: bytes | bytearray) -> int:
    """The decimal number at the beginning of `text`, as C's strtoll reads it: blanks before, anything behind."""
    found = _NUMBER.match(text)
    if found is not None:
        number = int(found[1] + b"0" + found[2])
        if _LOWEST <= number <= _HIGHEST:
            return number
    raise no_number(key, bytes(text[:40]))


def no_number(key: bytes, text: bytes) -> StoreProtocolError:
    """Something was to be added to what is there; `text` are its first bytes."""
    return StoreProtocolError(f"the value {text!r} of key {key[:200]!r} is not a number, so nothing can be added to it")
