"""A store within a store: the same store, seen through a prefix of its keys (contract section 9.6)."""

from __future__ import annotations

from typing import Any

from rallypoint.store.api import Store
from rallypoint.store.forwarding import ForwardingStore
from rallypoint.store.torch_adapter import torch_module


class PrefixStore(ForwardingStore):
    """`store`, with `prefix/` before every key.

    Prefixes of nested stores stand in the order from the innermost store outwards: through
    `PrefixStore("outer", PrefixStore("inner", store))`, `y` is `inner/outer/y`. The timeout is that of `store`.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        super().__init__(store)
        self._prefix = prefix

    @property
    def prefix(self) -> str:
        """The prefix, without its slash."""
        return self._prefix

    @property
    def underlying_store(self) -> Store:
        """The store that was given."""
        store: Store = self._store
        return store

    @property
    def _underlying_non_prefix_store(self) -> Store:
        store = self.underlying_store
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        return store

    def list_keys(self) -> list[str]:
        """The keys with this prefix, without it."""
        start = self._name("")
        return [key.removeprefix(start) for key in super().list_keys() if key.startswith(start)]

    def clone(self) -> PrefixStore:
        return PrefixStore(self._prefix, self._store.clone())

    def to_torch(self) -> Any:
        return torch_module().PrefixStore(self._prefix, self._store.to_torch())

    def close(self) -> None:
        """Close the underlying store."""
        self._store.close()

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"
