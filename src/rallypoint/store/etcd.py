"""A store in etcd, for what agents share beyond any one machine's life.

Each value is one key of etcd, so that `etcdctl` shows it. Waiting is a watch. What one request of etcd cannot do (add,
append, a queue's end) is read, decided and written if nothing has changed meanwhile, and else done again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from rallypoint.base.clock import Deadline
from rallypoint.etcd.api import (
    Compare,
    Delete,
    EtcdError,
    EtcdUnreachable,
    KeyValue,
    Operation,
    Put,
    Range,
    WatchEnd,
    WatchEvent,
)
from rallypoint.store.api import DEFAULT_TIMEOUT, ReplacingStore, key_bytes, key_text, value_bytes
from rallypoint.store.errors import QueueEmptyError, StoreConnectionError, StoreProtocolError, StoreTimeoutError

if TYPE_CHECKING:
    from datetime import timedelta

    from rallypoint.etcd.client import EtcdClient

T = TypeVar("T")

_MAX_OPERATIONS = 100
"""In one transaction; etcd's own limit is 128 by default."""


class EtcdStore(ReplacingStore):
    """A store under a prefix of etcd's keys.

    Args:
        client: of etcd; it stays the caller's, who closes it.
        prefix: what all keys of this store begin with.
        lease: of etcd, with which all that is stored goes; 0 for none.
        timeout: seconds, or a timedelta, that its methods wait by default.
    """

    def __init__(
        self, client: EtcdClient, prefix: bytes, lease: int = 0, timeout: timedelta | float = DEFAULT_TIMEOUT
    ) -> None:
        super().__init__(timeout)
        self._client = client
        self._prefix = prefix
        self._lease = lease
        self._values = prefix + b"values/"
        self._queues = prefix + b"queues/"

    def set(self, key: str, value: str | bytes) -> None:
        self._txn([], [self._put(self._key(key), value_bytes(value))])

    def check(self, keys: Sequence[str]) -> bool:
        return not self._missing(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        limit = self._seconds(timeout)
        deadline = Deadline.after(limit)
        while missing := self._missing(keys):
            first = [Range(self._key(missing[0])), self._items(missing[0])]
            if not self._await_change(first, deadline, lambda: not self._missing(missing[:1])):
                raise self._keys_timeout(keys, limit)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        while True:
            self.wait(keys)
            found = self._read_all([Range(self._key(key)) for key in keys])
            values = [each.value for each in found if each is not None]
            if len(values) == len(keys):
                return values

    def delete_key(self, key: str) -> bool:
        there = self._key(key)
        while (found := self._read(there)) is not None:
            if self._replace(there, found, None):
                return True
        return False

    def list_keys(self) -> list[str]:
        return [key_text(each.key.removeprefix(self._values)) for each in self._all(self._values)]

    def queue_push(self, key: str, value: str | bytes) -> None:
        queue = self._queue(key)
        counter = queue + b"pushed"
        while True:
            found = self._read(counter)
            number = 1 if found is None else int(found.value) + 1
            item = self._put(self._items(key).key + b"%020d" % number, value_bytes(value))
            if self._replace(counter, found, b"%d" % number, item):
                return

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        items = self._items(key)
        deadline = Deadline.after(self._timeout)
        while True:
            first = self._all(items.key, limit=1)
            if first and self._replace(first[0].key, first[0], None):
                return first[0].value
            if first:
                continue
            if not block:
                raise QueueEmptyError(f"in {self._where()}, the queue {key!r} is empty")
            if not self._await_change([items], deadline, lambda: bool(self._all(items.key, limit=1))):
                raise StoreTimeoutError(
                    f"nothing came into the queue {key!r} within {self._timeout:g} s in {self._where()}; "
                    "see whether the process that fills it is alive, or wait longer"
                )

    def queue_len(self, key: str) -> int:
        return len(self._all(self._items(key).key))

    def clone(self) -> EtcdStore:
        """Another one over the same client."""
        return EtcdStore(self._client, self._prefix, self._lease, self._timeout)

    # Names

    def _where(self) -> str:
        return f"etcd under {self._prefix.decode(errors='replace')}"

    def _key(self, key: str) -> bytes:
        return self._values + key_bytes(key)

    def _queue(self, key: str) -> bytes:
        name = key_bytes(key)
        return self._queues + b"%d:" % len(name) + name + b"/"  # no name is the beginning of another

    def _items(self, key: str) -> Range:
        """The values of a queue, or the first of them."""
        return Range(self._queue(key) + b"items/", prefix=True, limit=1)

    # What is asked of etcd

    def _put(self, key: bytes, value: bytes) -> Put:
        return Put(key, value, self._lease)

    def _read(self, key: bytes) -> KeyValue | None:
        return next(iter(self._as_store_errors(lambda: self._client.range(key)).kvs), None)

    def _all(self, prefix: bytes, limit: int = 0) -> tuple[KeyValue, ...]:
        return self._as_store_errors(lambda: self._client.range(prefix, prefix=True, limit=limit)).kvs

    def _read_all(self, asked: Sequence[Range]) -> list[KeyValue | None]:
        """The first of what each of these would find."""
        found: list[KeyValue | None] = []
        for begin in range(0, len(asked), _MAX_OPERATIONS):
            some = asked[begin : begin + _MAX_OPERATIONS]
            answers = self._as_store_errors(partial(self._client.txn, [], some, repeatable=True)).ranges
            found += [next(iter(each.kvs), None) for each in answers]
        return found

    def _change(self, key: str, choose: Callable[[bytes | None], bytes | None]) -> bytes | None:
        there = self._key(key)
        while True:
            found = self._read(there)
            present = None if found is None else found.value
            new = choose(present)
            if new is None:
                return present
            if self._replace(there, found, new):
                return new

    def _missing(self, keys: Sequence[str]) -> list[str]:
        """Those that have neither a value nor anything in their queue."""
        values = self._read_all([Range(self._key(key)) for key in keys])
        without = [key for key, each in zip(keys, values, strict=True) if each is None]
        queued = self._read_all([self._items(key) for key in without])
        return [key for key, each in zip(without, queued, strict=True) if each is None]

    def _replace(self, key: bytes, found: KeyValue | None, value: bytes | None, *more: Operation) -> bool:
        """Store a value, or with None none, where `found` still stands; returns whether it did."""
        revision = 0 if found is None else found.mod_revision
        operation: Operation = Delete(key) if value is None else self._put(key, value)
        unchanged = Compare(key, "mod_revision", "==", revision)
        return self._txn([unchanged], [operation, *more])

    def _txn(self, compares: Sequence[Compare], then: Sequence[Operation]) -> bool:
        return self._as_store_errors(lambda: self._client.txn(compares, then)).succeeded

    def _as_store_errors(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except EtcdUnreachable as error:
            raise StoreConnectionError(str(error)) from None
        except EtcdError as error:
            raise StoreProtocolError(str(error)) from None

    def _await_change(self, places: Sequence[Range], deadline: Deadline, is_there: Callable[[], bool]) -> bool:
        """Wait until something may have changed there; returns False when the time is over and it is not there."""
        changed = threading.Event()

        def on_events(_events: Sequence[WatchEvent]) -> None:
            changed.set()

        def on_lost(_lost: WatchEnd) -> None:
            changed.set()

        revision = self._as_store_errors(lambda: self._client.range(places[0].key)).revision
        watches = [
            self._client.watch(each.key, revision + 1, on_events, on_lost, prefix=each.prefix) for each in places
        ]
        try:
            if is_there():  # it came before the watches began
                return True
            changed.wait(deadline.remaining())
        finally:
            for watch in watches:
                watch.close()
        return is_there() or not deadline.expired
