"""A store within a store: the same store, seen through a prefix of its keys (contract section 9.6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rallypoint.store.api import Store
from rallypoint.store.torch_adapter import torch_module

if TYPE_CHECKING:
    from datetime import timedelta


class PrefixStore(Store):
    """`store`, with `prefix/` before every key.

    Prefixes of nested stores stand in the order from the innermost store outwards: through
    `PrefixStore("outer", PrefixStore("inner", store))`, `y` is `inner/outer/y`. The timeout is that of `store`.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        self._prefix = prefix
        self._store = store

    @property
    def prefix(self) -> str:
        """The prefix, without its slash."""
        return self._prefix

    @property
    def underlying_store(self) -> Store:
        """The store that was given."""
        return self._store

    @property
    def _underlying_non_prefix_store(self) -> Store:
        store = self._store
        while isinstance(store, PrefixStore):
            store = store._store
        return store

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout

    def set_timeout(self, timeout: timedelta | float) -> None:
        self._store.set_timeout(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(self._prefixed(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._prefixed(key))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._store.compare_set(self._prefixed(key), expected, desired)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._prefixed(key), amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(self._all_prefixed(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        self._store.wait(self._all_prefixed(keys), timeout)

    def append(self, key: str, value: str | bytes) -> None:
        self._store.append(self._prefixed(key), value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get(self._all_prefixed(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._store.multi_set(self._all_prefixed(keys), values)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(self._prefixed(key))

    def num_keys(self) -> int:
        """The number of keys in the whole underlying store, not of this prefix alone; as torch's."""
        return self._store.num_keys()

    def list_keys(self) -> list[str]:
        """The keys with this prefix, without it."""
        start = self._prefixed("")
        return [key.removeprefix(start) for key in self._store.list_keys() if key.startswith(start)]

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._store.queue_push(self._prefixed(key), value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._store.queue_pop(self._prefixed(key), block)

    def queue_len(self, key: str) -> int:
        return self._store.queue_len(self._prefixed(key))

    def barrier(self, key: str, world_size: int, timeout: timedelta | float | None = None) -> None:
        self._store.barrier(self._prefixed(key), world_size, timeout)

    def clone(self) -> PrefixStore:
        return PrefixStore(self._prefix, self._store.clone())

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()

    def to_torch(self) -> Any:
        return torch_module().PrefixStore(self._prefix, self._store.to_torch())

    def close(self) -> None:
        """Close the underlying store."""
        self._store.close()

    def _prefixed(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _all_prefixed(self, keys: Sequence[str]) -> list[str]:
        return [self._prefixed(key) for key in keys]
