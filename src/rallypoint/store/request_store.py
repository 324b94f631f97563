"""Every operation of a store, said once in terms of the protocol's requests.

Subclasses say only how one request is answered: by a server (`client`) or by a table of this process
(`hashstore`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from rallypoint.base.clock import Deadline
from rallypoint.store.api import Store, key_bytes, key_text, pairs, value_bytes
from rallypoint.store.errors import QueueEmptyError, StoreProtocolError
from rallypoint.store.wire import DONE, I64, MISSING, U64, Op

if TYPE_CHECKING:
    from datetime import timedelta

T = TypeVar("T")
Receive: TypeAlias = Callable[[int], bytes]
"""Gives exactly so many bytes of the reply."""

_MAX_REPLY = 1 << 40
"""Bytes of a value, or number of keys, beyond which a reply's length cannot be meant. APPEND can pass MAX_PAYLOAD."""


class RequestStore(Store):
    """A store whose operations are requests of `wire`, with a slash before each key as torch's clients have it."""

    @abstractmethod
    def _exchange(self, read: Callable[[Receive], T], op: Op, *fields: Any) -> T:
        """Make a request and read its reply."""

    @abstractmethod
    def _await(self, timeout: float, op: Op, *fields: Any) -> bool:
        """Make a request that is answered when something has happened; False if `timeout` seconds pass before."""

    def set(self, key: str, value: str | bytes) -> None:
        self._exchange(_nothing, Op.SET, _with_slash(key), value_bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._exchange(read_value, Op.GET, _with_slash(key))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        values = value_bytes(expected), value_bytes(desired)
        return self._exchange(read_value, Op.COMPARE_SET, _with_slash(key), *values)

    def add(self, key: str, amount: int) -> int:
        return self._exchange(read_number, Op.ADD, _with_slash(key), amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._exchange(_flag, Op.CHECK, list(map(_with_slash, keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        limit = self._seconds(timeout)
        self._wait(keys, limit, limit)

    def append(self, key: str, value: str | bytes) -> None:
        self._exchange(_nothing, Op.APPEND, _with_slash(key), value_bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)

        def read(receive: Receive) -> list[bytes]:
            return [read_value(receive) for _ in keys]

        return self._exchange(read, Op.MULTI_GET, list(map(_with_slash, keys)))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._exchange(_nothing, Op.MULTI_SET, [(_with_slash(key), value) for key, value in pairs(keys, values)])

    def delete_key(self, key: str) -> bool:
        return self._exchange(read_number, Op.DELETE_KEY, _with_slash(key)) == 1

    def num_keys(self) -> int:
        return self._exchange(read_number, Op.NUM_KEYS)

    def list_keys(self) -> list[str]:
        found = self._exchange(_values, Op.LIST_KEYS)
        return [key_text(key[1:]) for key in found if key.startswith(b"/")]

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._exchange(_nothing, Op.QUEUE_PUSH, _with_slash(key), value_bytes(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        deadline = Deadline.after(self._timeout)
        while True:
            if block:
                self._wait([key], deadline.remaining(), self._timeout)
            value = self._exchange(_read_queue_pop, Op.QUEUE_POP, _with_slash(key))
            if value is not None:
                return value
            if not block:
                raise QueueEmptyError(f"the queue {key!r} is empty in {self._where()}")
            # Another popped it after both had seen the value: wait for the next one.

    def queue_len(self, key: str) -> int:
        return self._exchange(read_number, Op.QUEUE_LEN, _with_slash(key))

    def barrier(self, key: str, world_size: int, timeout: timedelta | float | None = None) -> None:
        limit = self._seconds(timeout)
        if not self._await(limit, Op.BARRIER, _with_slash(key), world_size):
            raise self._barrier_timeout(key, world_size, limit)

    def _wait(self, keys: Sequence[str], remaining: float, timeout: float) -> None:
        if not self._await(remaining, Op.WAIT, list(map(_with_slash, keys))):
            raise self._keys_timeout(keys, timeout)


def _with_slash(key: str) -> bytes:
    return b"/" + key_bytes(key)


def _nothing(_receive: Receive) -> None:
    return None


def read_number(receive: Receive) -> int:
    (number,) = I64.unpack(receive(8))
    return int(number)


def read_value(receive: Receive) -> bytes:
    (size,) = U64.unpack(receive(8))
    return receive(_checked_length(size))


def _values(receive: Receive) -> list[bytes]:
    (count,) = U64.unpack(receive(8))
    return [read_value(receive) for _ in range(_checked_length(count))]


def _read_queue_pop(receive: Receive) -> bytes | None:
    return read_value(receive) if read_number(receive) > 0 else None


def _flag(receive: Receive) -> bool:
    answer = receive(1)
    if answer not in {DONE, MISSING}:
        raise StoreProtocolError(f"the store answered CHECK with {answer!r}, which is not the protocol")
    return answer == DONE


def _checked_length(size: int) -> int:
    if size > _MAX_REPLY:
        raise StoreProtocolError(f"the store's reply claims to be {size} long, so this is not a store's reply")
    return size
