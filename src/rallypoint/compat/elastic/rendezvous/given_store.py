"""Stores that third parties hand to a rendezvous: Rallypoint's, or torch's own, which have the same methods."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from rallypoint.store.api import Store, seconds
from rallypoint.store.errors import StoreConnectionError, StoreError, StoreTimeoutError
from rallypoint.store.prefix import ForwardingStore

__all__ = ["given"]


def given(store: Any) -> Store:
    """`store` itself if it is Rallypoint's, else one that hands every call on to it."""
    return store if isinstance(store, Store) else _Foreign(store)


class _Foreign(ForwardingStore):
    """Any object with the methods of torch's `Store`. What it raises is made one of Rallypoint's store errors."""

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=seconds(self._store.timeout))

    def to_torch(self) -> Any:
        return self._store

    def clone(self) -> _Foreign:
        return _Foreign(self._call("clone"))

    def _limit(self, timeout: timedelta | float | None) -> timedelta:
        return self.timeout if timeout is None else timedelta(seconds=seconds(timeout))

    def _value(self, value: str | bytes) -> str:
        return value if isinstance(value, str) else value.decode()

    def _call(self, method: str, *arguments: object) -> Any:
        try:
            return getattr(self._store, method)(*arguments)
        except StoreError:
            raise
        except (RuntimeError, LookupError) as error:
            raise _kind(error)(f"the store {type(self._store).__name__} raised: {error}") from error


def _kind(error: Exception) -> type[StoreError]:
    """torch's own types cannot be imported here; its messages name timeouts."""
    if type(error).__name__ == "DistNetworkError":
        return StoreConnectionError
    return StoreTimeoutError if "timeout" in str(error).lower() or isinstance(error, LookupError) else StoreError
