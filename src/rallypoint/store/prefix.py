"""Stores on top of other stores: one forwards every call, and one adds a prefix to keys (contract 9.6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rallypoint.store.api import Store, torch_module

if TYPE_CHECKING:
    from datetime import timedelta


class ForwardingStore(Store):
    """Subclasses change the names of keys (`_name`) or the calls to the other store."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def _call(self, method: str, *arguments: object) -> Any:
        return getattr(self._store, method)(*arguments)

    def _name(self, key: str) -> str:
        return key

    def _value(self, value: str | bytes) -> str | bytes:
        """Convert a value to a form that the other store accepts, if it does not accept all bytes."""
        return value

    def _limit(self, timeout: timedelta | float | None) -> timedelta | float | None:
        """Convert a timeout to a form that the other store accepts."""
        return timeout

    @property
    def timeout(self) -> timedelta:
        timeout: timedelta = self._store.timeout
        return timeout

    def set_timeout(self, timeout: timedelta | float) -> None:
        self._call("set_timeout", self._limit(timeout))

    def set(self, key: str, value: str | bytes) -> None:
        self._call("set", self._name(key), value)

    def get(self, key: str) -> bytes:
        return bytes(self._call("get", self._name(key)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return bytes(self._call("compare_set", self._name(key), self._value(expected), self._value(desired)))

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", self._name(key), amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._call("check", list(map(self._name, keys))))

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        self._call("wait", list(map(self._name, keys)), self._limit(timeout))

    def append(self, key: str, value: str | bytes) -> None:
        self._call("append", self._name(key), self._value(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(map(bytes, self._call("multi_get", list(map(self._name, keys)))))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._call("multi_set", list(map(self._name, keys)), list(map(self._value, values)))

    def delete_key(self, key: str) -> bool:
        return bool(self._call("delete_key", self._name(key)))

    def num_keys(self) -> int:
        """The number of keys in the whole other store, as in torch."""
        return int(self._call("num_keys"))

    def list_keys(self) -> list[str]:
        return list(self._call("list_keys"))

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._call("queue_push", self._name(key), value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return bytes(self._call("queue_pop", self._name(key), block))

    def queue_len(self, key: str) -> int:
        return int(self._call("queue_len", self._name(key)))

    def barrier(self, key: str, world_size: int, timeout: timedelta | float | None = None) -> None:
        self._call("barrier", self._name(key), world_size, self._limit(timeout))

    def has_extended_api(self) -> bool:
        return bool(self._call("has_extended_api"))


class PrefixStore(ForwardingStore):
    """`store`, with `prefix/` before every key.

    Nested stores' prefixes are ordered from the innermost store outwards: through `PrefixStore("outer",
    PrefixStore("inner", store))`, `y` is `inner/outer/y`. The timeout is `store`'s.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        super().__init__(store)
        self._prefix = prefix

    @property
    def prefix(self) -> str:
        return self._prefix

    @property
    def underlying_store(self) -> Store:
        store: Store = self._store
        return store

    @property
    def _underlying_non_prefix_store(self) -> Store:
        store = self.underlying_store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        return store

    def list_keys(self) -> list[str]:
        start = self._name("")
        return [key.removeprefix(start) for key in super().list_keys() if key.startswith(start)]

    def clone(self) -> PrefixStore:
        return PrefixStore(self._prefix, self._store.clone())

    def to_torch(self) -> Any:
        return torch_module().PrefixStore(self._prefix, self._store.to_torch())

    def close(self) -> None:
        self._store.close()

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"
