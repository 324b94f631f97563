"""Stores that third parties hand to a rendezvous: Rallypoint's, or torch's own, which have the same methods."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from rallypoint.store.api import Store, seconds
from rallypoint.store.errors import StoreConnectionError, StoreError, StoreTimeoutError

__all__ = ["given"]


def given(store: Any) -> Store:
    """`store` itself if it is Rallypoint's, else one that hands every call on to it."""
    return store if isinstance(store, Store) else _Foreign(store)


class _Foreign(Store):
    """Any object with the methods of torch's `Store`. What it raises is made one of Rallypoint's store errors."""

    def __init__(self, store: Any) -> None:
        super().__init__(store.timeout)
        self._store = store

    def to_torch(self) -> Any:
        return self._store

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=seconds(self._store.timeout))

    def set_timeout(self, timeout: timedelta | float) -> None:
        self._call("set_timeout", timedelta(seconds=seconds(timeout)))

    def set(self, key: str, value: str | bytes) -> None:
        self._call("set", key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._call("get", key))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return bytes(self._call("compare_set", key, _text(expected), _text(desired)))

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._call("check", list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        self._call("wait", list(keys), self.timeout if timeout is None else timedelta(seconds=seconds(timeout)))

    def append(self, key: str, value: str | bytes) -> None:
        self._call("append", key, _text(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [bytes(value) for value in self._call("multi_get", list(keys))]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._call("multi_set", list(keys), [_text(value) for value in values])

    def delete_key(self, key: str) -> bool:
        return bool(self._call("delete_key", key))

    def num_keys(self) -> int:
        return int(self._call("num_keys"))

    def list_keys(self) -> list[str]:
        return list(self._call("list_keys"))

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._call("queue_push", key, value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return bytes(self._call("queue_pop", key, block))

    def queue_len(self, key: str) -> int:
        return int(self._call("queue_len", key))

    def barrier(self, key: str, world_size: int, timeout: timedelta | float | None = None) -> None:
        limit = self.timeout if timeout is None else timedelta(seconds=seconds(timeout))
        self._call("barrier", key, world_size, limit)

    def clone(self) -> _Foreign:
        return _Foreign(self._call("clone"))

    def has_extended_api(self) -> bool:
        return bool(self._call("has_extended_api"))

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


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode()
