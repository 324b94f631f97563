"""What all stores have in common (contract section 9.5).

Keys are text and values bytes; a value given as text is stored as UTF-8. Timeouts are seconds, or timedeltas as torch's
callers give them. A store may be used by several threads; where one of them waits, the others of a `TCPStore` wait too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rallypoint.base.errors import UserError

if TYPE_CHECKING:
    from datetime import timedelta

DEFAULT_TIMEOUT = 300.0
"""Seconds that a store waits where nobody said otherwise, as torch's do."""

S = TypeVar("S", bound="Store")


class Store(ABC):
    """A key-value store with waiting, counting, queues and barriers.

    Every method raises StoreConnectionError if the store has gone, StoreTimeoutError if it does not answer within the
    store's timeout, and StoreProtocolError if a key or a value is beyond its bounds.
    """

    def __init__(self, timeout: timedelta | float = DEFAULT_TIMEOUT) -> None:
        self._timeout = seconds(timeout)

    @property
    def timeout(self) -> timedelta:
        """How long `get`, `wait`, `multi_get`, `queue_pop` and `barrier` wait where they are not told otherwise."""
        from datetime import timedelta

        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Set `timeout`.

        Raises:
            UserError: it is negative, or no number.
        """
        self._timeout = seconds(timeout)

    def _seconds(self, timeout: timedelta | float | None) -> float:
        return self._timeout if timeout is None else seconds(timeout)

    @abstractmethod
    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """The value; waits until the key is there.

        Raises:
            StoreTimeoutError: it did not come within the store's timeout.
        """

    @abstractmethod
    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Store `desired` if the present value is `expected`, where a missing key counts as empty.

        Returns:
            The value that is now there. Where the key is missing and `expected` is not empty, nothing is stored and
            `expected` is returned, as torch's stores do.
        """

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to a number (a missing key counts as 0) and return the sum. The value is kept as decimal text.

        Raises:
            UserError: there is a value that is no number. With a server, StoreConnectionError, for it then closes the
                connection, as torch's does.
        """

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        """Wait until all keys are there.

        Raises:
            StoreTimeoutError: they did not come within the timeout, by default the store's.
        """

    @abstractmethod
    def append(self, key: str, value: str | bytes) -> None:
        """Lengthen a value by another; a missing key counts as empty."""

    @abstractmethod
    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values; waits until all keys are there.

        Raises:
            StoreTimeoutError: they did not come within the store's timeout.
        """

    @abstractmethod
    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Store one value for each key, one by one.

        Raises:
            UserError: there are not as many values as keys.
        """

    @abstractmethod
    def delete_key(self, key: str) -> bool:
        """Remove a value. Whether it was there."""

    @abstractmethod
    def num_keys(self) -> int:
        """The number of keys, those of the store's own bookkeeping included where it keeps any in the store."""

    @abstractmethod
    def list_keys(self) -> list[str]:
        """The names of all keys, in no order."""

    @abstractmethod
    def queue_push(self, key: str, value: str | bytes) -> None:
        """Put a value at the end of a queue. Queues and values of the same name have nothing to do with each other.

        Raises:
            NotImplementedError: the store has no queues.
        """

    @abstractmethod
    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the oldest value out of a queue; unless `block` is false, waits for one.

        Raises:
            QueueEmptyError: there was none, and `block` is false. (Torch's raises it also when another was quicker.)
            StoreTimeoutError: none came within the store's timeout.
            NotImplementedError: the store has no queues.
        """

    @abstractmethod
    def queue_len(self, key: str) -> int:
        """The number of values in a queue.

        Raises:
            NotImplementedError: the store has no queues.
        """

    @abstractmethod
    def barrier(self, key: str, world_size: int, timeout: timedelta | float | None = None) -> None:
        """Wait until `world_size` callers have come to this barrier. One that has opened stays open.

        Raises:
            StoreTimeoutError: they did not come within the timeout, by default the store's. The caller stays counted.
        """

    @abstractmethod
    def clone(self: S) -> S:
        """Another store with the same content, for another thread."""

    @abstractmethod
    def has_extended_api(self) -> bool:
        """Whether all of append, multi_get, multi_set and the queues are there and done by the store itself."""

    def to_torch(self) -> Any:
        """A `torch.distributed.Store` with the same content, for code that hands it to torch.

        Raises:
            UserError: `torch.distributed` is not imported; nothing here imports it.
        """
        from rallypoint.store.torch_adapter import to_torch

        return to_torch(self)

    def close(self) -> None:  # noqa: B027 - most stores hold nothing
        """Give back what the store holds, such as a connection. It cannot be used any more. Idempotent."""


def seconds(timeout: timedelta | float) -> float:
    """A timeout in seconds.

    Raises:
        UserError: it is negative, or no number.
    """
    value = float(timeout) if isinstance(timeout, int | float) else timeout.total_seconds()
    if not value >= 0:
        raise UserError(f"a store's timeout cannot be {value:g} s; give 0 or more seconds")
    return value


def key_bytes(key: str) -> bytes:
    """A key as it is stored, before any prefix. Bytes that `key_text` could not read come out as they were."""
    return key.encode("utf-8", "surrogateescape")


def key_text(key: bytes) -> str:
    """The key that `key_bytes` would store so; what is not UTF-8 becomes lone surrogates."""
    return key.decode("utf-8", "surrogateescape")


def value_bytes(value: str | bytes) -> bytes:
    """A value as it is stored."""
    return value.encode() if isinstance(value, str) else bytes(value)


def check_pairs(keys: Sequence[str], values: Sequence[str | bytes]) -> None:
    """Raises UserError unless there is one value for each key."""
    if len(keys) != len(values):
        raise UserError(f"multi_set was given {len(keys)} keys and {len(values)} values; give one value for each key")


def named(keys: Sequence[str]) -> str:
    """Keys that are missing, for a message; not all of a thousand."""
    shown = ", ".join(map(repr, keys[:3]))
    return f"the key {shown}" if len(keys) == 1 else f"some of the {len(keys)} keys {shown}" + ", ..." * (len(keys) > 3)
