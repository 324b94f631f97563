"""The semantics of requests: keys, queues, waiters and barriers (contract section 9.3).

Pure. A command takes a client (any hashable token) and the fields of its request, and returns the replies to send,
some of which may be for other clients. Laws:

- **Keys** hold bytes. A queue of the same name is another thing; it exists while it is not empty.
- **One outstanding wait for each client** (`waiting`): a later WAIT or BARRIER takes the place of an earlier one.
- **A change of a key wakes all who wait for it**, whatever the change: what was seen set stays seen, even if it is
  deleted before the rest has come. COMPARE_SET wakes them also when it stores nothing. A push wakes, in the order in
  which they came, those for whom this was one key of several, up to and including the first who has now got all.
  (Torch's server counts a later push to such a client once more, and ends its wait while a key is still missing.)
- **BARRIER is a number under a normal key**. Arriving at less than the world size wakes nobody, neither waiters nor
  earlier arrivals; arriving at the world size or beyond wakes all.
- **Waiters are answered first**, then who has woken them: a client can do both, and reads its replies in that order.
- **A client that has left is forgotten**, and gets no more replies.
- **What takes long is done step by step** (`Work`), and others are served between the steps: a request of many keys
  looks at some of them now and at others later, as if it had come in pieces. LIST_KEYS alone lists what was there at
  one moment (`listing`).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

from rallypoint.store.guard import ENTRY_OVERHEAD
from rallypoint.store.listing import MASK, SHARDS, KeyListings, Shards
from rallypoint.store.refusals import Reason, refusal
from rallypoint.store.waiters import Waiters
from rallypoint.store.wire import CANCELLED, DONE, I64, MISSING, U32, U64, Op

C = TypeVar("C", bound=Hashable)
Reply: TypeAlias = tuple[C, bytes]
"""Who gets which bytes."""
Replies: TypeAlias = bytes | list[Reply[C]]
"""All replies that a command earns, in the order in which they must be sent. Just bytes, perhaps none, are for the
asker alone: nearly every command ends so, and the server's speed lives on it."""

Work: TypeAlias = "Generator[Replies[C], None, None]"
"""The same, step by step. Each step is a few microseconds, whatever there is in the table, and the asker's next request
is executed after the last one. A caller that does not finish it closes it."""

MERGE_LIMIT = 64 * 1024
"""Bytes up to which a value travels in one piece with its length; a longer one is not copied."""

_KEYS_PER_STEP = 16
"""Keys of one request that are seen to in one step."""
_NUMBER_TEXT = 4096
"""Bytes of a value in which a number is looked for."""
_NUMBER = re.compile(rb"\s*+([+-]?)(?=[0-9])0*+([0-9]{0,19}+)(?![0-9])")
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1
_NOTHING = b""


class Table(Generic[C]):
    """The keys and queues of one store, and who waits for them.

    Args:
        value_limit: bytes to which a value may grow by APPEND.
    """

    def __init__(self, value_limit: float = float("inf")) -> None:
        self._value_limit = value_limit
        self._shards: Shards = [{} for _ in range(SHARDS)]  # bytearrays are appended to, until they are read
        self._listings = KeyListings(self._shards)
        self.keys = 0
        """Names of values and queues."""
        self.bytes = 0
        """Of these names, the values and what is in queues; each name and each value in a queue counts 64 more."""
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waiters: Waiters[C] = Waiters()

    def commands(self) -> Mapping[Op, Callable[..., Replies[C] | Work[C]]]:
        """What to call for each opcode, with the client and the fields of the request."""
        return {op: getattr(self, op.name.lower()) for op in Op if op is not Op.VALIDATE}

    def execute(self, client: C, op: Op, *fields: Any) -> Sequence[Reply[C]]:
        """Do what `client` asks for; returns all replies.

        Raises:
            StoreProtocolError: ADD or BARRIER on a value that is no number. Nothing is changed.
        """
        done = getattr(self, op.name.lower())(client, *fields)
        steps = done if isinstance(done, Generator) else [done]
        return [reply for replies in steps for reply in _list_reply(client, replies) if reply[1]]

    def forget(self, client: C) -> None:
        """The client has left, or no longer waits."""
        self._waiters.cancel(client)

    def clear(self, steps: int) -> bool:
        """Tidy up so much behind those who were forgotten; whether something is left."""
        return self._waiters.clear(steps)

    def set(self, _client: C, key: bytes, value: bytes) -> Replies[C]:
        """Store a value. No reply."""
        self._put(key, value)
        return self._wake(key) if key in self._waiters.lines else _NOTHING

    def multi_set(self, client: C, pairs: Sequence[tuple[bytes, bytes]]) -> Replies[C]:
        """Store several values. No reply."""
        return [reply for key, value in pairs for reply in _list_reply(client, self.set(client, key, value))]

    def append(self, _client: C, key: bytes, value: bytes) -> Replies[C]:
        """Lengthen a value. No reply. Raises StoreProtocolError if it were to become longer than it may."""
        present = self._shards[hash(key) & MASK].get(key, b"")
        if len(present) + len(value) > self._value_limit:
            raise refusal(Reason.GROWN_VALUE, len(present) + len(value), self._value_limit)
        if isinstance(present, bytes):
            present = bytearray(present)
            self._put(key, present)
        present += value
        self.bytes += len(value)
        return self._wake(key)

    def compare_set(self, client: C, key: bytes, expected: bytes, desired: bytes) -> Replies[C]:
        """Store `desired` if the present value is `expected`. The reply is the value that is now there."""
        present = self._read(key)
        if expected == (present or b""):
            self._put(key, desired)
            present = desired
        # Where the key is missing and something was expected, the protocol gives back what was expected.
        reply = _value(client, expected if present is None else present)
        return [*self._wake(key), *_list_reply(client, reply)] if key in self._waiters.lines else reply

    def get(self, client: C, key: bytes) -> Replies[C]:
        """The reply is the value, empty if there is none."""
        value = self._shards[hash(key) & MASK].get(key, b"")
        if len(value) <= MERGE_LIMIT:
            return U64.pack(len(value)) + value
        return _value(client, self._read(key) or b"")

    def multi_get(self, client: C, keys: Sequence[bytes]) -> Replies[C] | Work[C]:
        """The reply is one value for each key, empty where there is none."""
        return self.get(client, keys[0]) if len(keys) == 1 else self._get_each(client, keys)

    def _get_each(self, client: C, keys: Sequence[bytes]) -> Work[C]:
        for key in keys:
            yield self.get(client, key)

    def add(self, client: C, key: bytes, delta: int) -> Replies[C]:
        """Add to a number. The reply is the sum. Raises StoreProtocolError if there is a value that is no number."""
        reply = I64.pack(self._increase(key, delta))
        return [*self._wake(key), (client, reply)] if key in self._waiters.lines else reply

    def check(self, _client: C, keys: Sequence[bytes]) -> Replies[C] | Work[C]:
        """The reply is whether all keys are there, as values or as queues."""
        if len(keys) > _KEYS_PER_STEP:
            return self._check_many(keys)
        return DONE if self._has_all(keys) else MISSING

    def _check_many(self, keys: Sequence[bytes]) -> Work[C]:
        for some in _in_steps(keys):
            if not self._has_all(some):
                yield MISSING
                return
            yield _NOTHING
        yield DONE

    def wait(self, client: C, keys: Sequence[bytes]) -> Replies[C] | Work[C]:
        """The reply comes when all keys are there."""
        if len(keys) > _KEYS_PER_STEP:
            return self._wait_for_many(client, keys)
        if self._has_all(keys):
            return DONE
        self._waiters.begin(client)
        self._add_waiter(client, keys)
        return DONE if self._waiters.end_of_keys(client) else _NOTHING

    def _wait_for_many(self, client: C, keys: Sequence[bytes]) -> Work[C]:
        for some in _in_steps(keys):
            if not self._has_all(some):
                break
            yield _NOTHING
        else:
            yield DONE
            return
        self._waiters.begin(client)
        for some in _in_steps(keys):
            self._add_waiter(client, some)
            yield _NOTHING
        yield DONE if self._waiters.end_of_keys(client) else _NOTHING

    def cancel_wait(self, client: C) -> Replies[C]:
        """Wait no longer."""
        self.forget(client)
        return CANCELLED

    def num_keys(self, _client: C) -> Replies[C]:
        """The reply is the number of values."""
        return I64.pack(sum(map(len, self._shards)))

    def list_keys(self, _client: C) -> Work[C]:
        """The reply is the names of all values."""
        yield from self._listings.names()

    def delete_key(self, _client: C, key: bytes) -> Replies[C]:
        """Remove a value; a queue of that name stays. The reply is whether it was there."""
        index = hash(key) & MASK
        shard = self._shards[index]
        if key not in shard:
            return I64.pack(0)
        if self._listings.any_open:
            self._listings.keep_snapshot(index)
        self.bytes -= len(shard.pop(key))
        if key not in self._queues:
            self._uncount_key(key)
        return I64.pack(1)

    def ping(self, _client: C, nonce: int) -> Replies[C]:
        """The reply is the nonce."""
        return U32.pack(nonce)

    def queue_push(self, _client: C, key: bytes, value: bytes) -> Replies[C]:
        """Put a value at the end of a queue. No reply."""
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = deque()
            if key not in self._shards[hash(key) & MASK]:
                self._count(key)
        queue.append(value)
        self.bytes += len(value) + ENTRY_OVERHEAD
        return [(client, DONE) for client in self._waiters.wake_first(key)]

    def queue_pop(self, client: C, key: bytes) -> Replies[C]:
        """The reply is the length before, and if that is not 0 the oldest value, which is then gone."""
        queue = self._queues.get(key)
        if queue is None:
            return I64.pack(0)
        length = I64.pack(len(queue))
        value = queue.popleft()
        self.bytes -= len(value) + ENTRY_OVERHEAD
        if not queue:
            del self._queues[key]
            if key not in self._shards[hash(key) & MASK]:
                self._uncount_key(key)
        return [(client, length), *_list_reply(client, _value(client, value))]

    def queue_len(self, _client: C, key: bytes) -> Replies[C]:
        """The reply is the length of a queue."""
        return I64.pack(len(self._queues.get(key, ())))

    def barrier(self, client: C, key: bytes, world_size: int) -> Replies[C]:
        """The reply comes when `world_size` have arrived. Raises StoreProtocolError if the value is no number."""
        if self._increase(key, 1) >= world_size:
            return [*self._wake(key), (client, DONE)]
        self._waiters.begin(client)
        self._waiters.add(client, key)
        self._waiters.end_of_keys(client)
        return _NOTHING

    def _put(self, key: bytes, value: bytes | bytearray) -> None:
        index = hash(key) & MASK
        shard = self._shards[index]
        present = shard.get(key)
        if present is None and self._listings.any_open:
            self._listings.keep_snapshot(index)
        shard[key] = value
        self.bytes += len(value) - len(present or b"")
        if present is None and key not in self._queues:
            self._count(key)

    def _count(self, key: bytes) -> None:
        """A name that was of nothing is of something."""
        self.keys += 1
        self.bytes += len(key) + ENTRY_OVERHEAD

    def _uncount_key(self, key: bytes) -> None:
        """There is nothing of this name any more."""
        self.keys -= 1
        self.bytes -= len(key) + ENTRY_OVERHEAD

    def _read(self, key: bytes) -> bytes | None:
        shard = self._shards[hash(key) & MASK]
        value = shard.get(key)
        if isinstance(value, bytearray):  # replies may be on their way for long: they need a value that stays as it is
            value = shard[key] = bytes(value)
        return value

    def _increase(self, key: bytes, delta: int) -> int:
        present = self._shards[hash(key) & MASK].get(key, b"0")
        total = delta + (int(present) if present.isdigit() and len(present) < 19 else _number(key, present))
        if not _LOWEST <= total <= _HIGHEST:
            total = (total - _LOWEST) % (1 << 64) + _LOWEST
        self._put(key, b"%d" % total)
        return total

    def _has_all(self, keys: Sequence[bytes]) -> bool:
        shards, queues = self._shards, self._queues
        for key in keys:  # noqa: SIM110 - a loop takes half the time of all() here, and this runs for every WAIT
            if key not in shards[hash(key) & MASK] and key not in queues:
                return False
        return True

    def _add_waiter(self, client: C, keys: Sequence[bytes]) -> None:
        for key in keys:
            # A key that has only a queue counts as missing here, although a wait for it alone would be over at once.
            if key not in self._shards[hash(key) & MASK]:
                self._waiters.add(client, key)

    def _wake(self, key: bytes) -> list[Reply[C]]:
        return [(client, DONE) for client in self._waiters.wake(key)]


def _list_reply(client: C, replies: Replies[C]) -> Sequence[Reply[C]]:
    return [(client, replies)] if isinstance(replies, bytes) else replies


def _value(client: C, value: bytes) -> Replies[C]:
    length = U64.pack(len(value))
    return length + value if len(value) <= MERGE_LIMIT else [(client, length), (client, value)]


def _number(key: bytes, text: bytes | bytearray) -> int:
    """The decimal number at the beginning of `text`, as C's strtoll reads it: blanks before, anything behind."""
    found = _NUMBER.match(text[:_NUMBER_TEXT])
    if found is not None:
        number = int(found[1] + b"0" + found[2])
        if _LOWEST <= number <= _HIGHEST:
            return number
    raise refusal(Reason.NO_NUMBER, first=bytes(text[:40]), second=key[:200])


def _in_steps(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    return (keys[start : start + _KEYS_PER_STEP] for start in range(0, len(keys), _KEYS_PER_STEP))
