"""Every operation of a store, said once in terms of the protocol's requests.

Who subclasses this says only how one request is answered: by a server (`client`) or by a table of this process
(`hashstore`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from rallypoint.base.clock import Deadline
from rallypoint.store import wire
from rallypoint.store.api import Store, key_bytes, key_text, pairs, value_bytes
from rallypoint.store.errors import QueueEmptyError, StoreProtocolError
from rallypoint.store.wire import DONE, I64, MISSING, U64

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
    def _exchange(self, request: wire.Request, read: Callable[[Receive], T]) -> T:
        """Make a request and read its reply."""

    @abstractmethod
    def _await(self, request: wire.Wait | wire.Barrier, timeout: float) -> bool:
        """Make a request that is answered when something has happened; False if `timeout` seconds pass before."""

    def set(self, key: str, value: str | bytes) -> None:
        self._exchange(wire.Set(_with_slash(key), value_bytes(value)), _nothing)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._exchange(wire.Get(_with_slash(key)), read_value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._exchange(
            wire.CompareSet(_with_slash(key), value_bytes(expected), value_bytes(desired)), read_value
        )

    def add(self, key: str, amount: int) -> int:
        return self._exchange(wire.Add(_with_slash(key), amount), read_number)

    def check(self, keys: Sequence[str]) -> bool:
        return self._exchange(wire.Check([_with_slash(key) for key in keys]), _flag)

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        limit = self._seconds(timeout)
        self._wait(keys, limit, limit)

    def append(self, key: str, value: str | bytes) -> None:
        self._exchange(wire.Append(_with_slash(key), value_bytes(value)), _nothing)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)

        def read(receive: Receive) -> list[bytes]:
            return [read_value(receive) for _ in keys]

        return self._exchange(wire.MultiGet([_with_slash(key) for key in keys]), read)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._exchange(wire.MultiSet([(_with_slash(key), value) for key, value in pairs(keys, values)]), _nothing)

    def delete_key(self, key: str) -> bool:
        return self._exchange(wire.DeleteKey(_with_slash(key)), read_number) == 1

    def num_keys(self) -> int:
        return self._exchange(wire.NumKeys(), read_number)

    def list_keys(self) -> list[str]:
        found = self._exchange(wire.ListKeys(), _values)
        return [key_text(key[1:]) for key in found if key.startswith(b"/")]

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._exchange(wire.QueuePush(_with_slash(key), value_bytes(value)), _nothing)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        deadline = Deadline.after(self._timeout)
        while True:
            if block:
                self._wait([key], deadline.remaining(), self._timeout)
            value = self._exchange(wire.QueuePop(_with_slash(key)), _read_queue_pop)
            if value is not None:
                return value
            if not block:
                raise QueueEmptyError(f"the queue {key!r} is empty in {self._where()}")
            # Another was quicker after both had seen the value: wait for the next one.

    def queue_len(self, key: str) -> int:
        return self._exchange(wire.QueueLen(_with_slash(key)), read_number)

    def barrier(self, key: str, world_size: int, timeout: timedelta | float | None = None) -> None:
        limit = self._seconds(timeout)
        if not self._await(wire.Barrier(_with_slash(key), world_size), limit):
            raise self._barrier_timeout(key, world_size, limit)

    def _wait(self, keys: Sequence[str], remaining: float, timeout: float) -> None:
        if not self._await(wire.Wait([_with_slash(key) for key in keys]), remaining):
            raise self._keys_timeout(keys, timeout)


def _with_slash(key: str) -> bytes:
    return b"/" + key_bytes(key)


def _nothing(_receive: Receive) -> None:
    return None


def read_number(receive: Receive) -> int:
    """An i64."""
    (number,) = I64.unpack(receive(8))
    return int(number)


def read_value(receive: Receive) -> bytes:
    """A string."""
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
        raise StoreProtocolError(f"the store answered CHECK with {answer!r}, which no store does")
    return answer == DONE


def _checked_length(size: int) -> int:
    if size > _MAX_REPLY:
        raise StoreProtocolError(f"the store's reply claims to be {size} long, so this is no store's reply")
    return size
