"""The interface and common parts of all stores (contract section 9.5).

Keys are text and values are bytes; a text value is stored as UTF-8. Timeouts are seconds or, for torch's callers,
timedeltas. Several threads can use a store; while one of them waits in a `TCPStore`, the others wait too. This code
never imports torch: `to_torch` creates stores for torch's code.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

from rallypoint.base.clock import Deadline
from rallypoint.base.errors import UserError
from rallypoint.store.errors import QueueEmptyError, StoreProtocolError, StoreTimeoutError
from rallypoint.store.wire import DONE, I64, MISSING, U64, Op

DEFAULT_TIMEOUT = 300.0
"""Default seconds that a store waits, as in torch."""

S = TypeVar("S", bound="Store")


class Store(ABC):
    """A key-value store with waiting, counting, queues and barriers.

    Every method raises StoreConnectionError if the store is lost; StoreTimeoutError if it does not answer, or if a wait
    does not end within the call's or the store's timeout; and StoreProtocolError if a key or a value is out of bounds.
    Queue methods raise NotImplementedError if the store has no queues.
    """

    def __init__(self, timeout: timedelta | float = DEFAULT_TIMEOUT) -> None:
        self._timeout = seconds(timeout)

    @property
    def timeout(self) -> timedelta:
        """Default time that `get`, `wait`, `multi_get`, `queue_pop` and `barrier` wait."""
        return timedelta(seconds=self._timeout)

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Set `timeout`. Raises UserError if it is negative or not a number."""
        self._timeout = seconds(timeout)

    def _seconds(self, timeout: timedelta | float | None) -> float:
        return self._timeout if timeout is None else seconds(timeout)

    @abstractmethod
    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""

    def get(self, key: str) -> bytes:
        """Return the value; wait until the key exists."""
        return self.multi_get([key])[0]

    @abstractmethod
    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Store `desired` if the current value is `expected`; a missing key counts as empty.

        Returns:
            The resulting value. If the key is missing and `expected` is not empty, nothing is stored and `expected` is
            returned, as in torch's stores.
        """

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to a number (a missing key counts as 0) and return the sum. The value is stored as decimal text.

        Raises:
            UserError: the current value is not a number. A server causes StoreConnectionError instead, because it
                closes the connection, as torch's does.
        """

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        """Wait until all keys exist."""

    @abstractmethod
    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value; a missing key counts as empty."""

    @abstractmethod
    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values; wait until all keys exist."""

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Store one value per key, one by one. Raises UserError if the numbers of values and keys differ."""
        for key, value in pairs(keys, values):
            self.set(key, value)

    @abstractmethod
    def delete_key(self, key: str) -> bool:
        """Remove a key. Returns whether it existed."""

    def num_keys(self) -> int:
        """The number of keys, including the store's own bookkeeping, if any."""
        return len(self.list_keys())

    @abstractmethod
    def list_keys(self) -> list[str]:
        """The names of all keys, in any order."""

    def queue_push(self, key: str, value: str | bytes) -> None:
        """Add a value to the end of a queue. A queue and a value with the same name are independent."""
        raise NotImplementedError(_NO_QUEUES.format(self._title()))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the oldest value from a queue; wait for one unless `block` is false.

        Raises:
            QueueEmptyError: the queue was empty, and `block` is false. (torch's store also raises it if another caller
                was faster.)
        """
        raise NotImplementedError(_NO_QUEUES.format(self._title()))

    def queue_len(self, key: str) -> int:
        """The number of values in a queue."""
        raise NotImplementedError(_NO_QUEUES.format(self._title()))

    def barrier(self, key: str, world_size: int, timeout: timedelta | float | None = None) -> None:
        """Wait until `world_size` callers reach this barrier. An open barrier stays open; after a timeout, the caller
        still counts."""
        # A server implements barriers itself; elsewhere the members are counted under torch's key names.
        limit = self._seconds(timeout)
        opened = f"{key}/last_member"
        if self.add(f"{key}/num_members", 1) >= world_size:
            self.set(opened, b"1")
        try:
            self.wait([opened], limit)
        except StoreTimeoutError:
            raise self._barrier_timeout(key, world_size, limit) from None

    @abstractmethod
    def clone(self: S) -> S:
        """Another store with the same content, for another thread."""

    def has_extended_api(self) -> bool:
        """Whether the store itself implements append, multi_get, multi_set and the queues."""
        return True

    def to_torch(self) -> Any:
        """Create a `torch.distributed.Store` with the same content, for code that passes it to torch.

        For a store on a server, in a file, or within another store, it is torch's own kind; for any other, a store that
        forwards every call.

        Raises:
            UserError: `torch.distributed` is not imported; this code never imports it.
        """

        return forwarding_store(self)

    def close(self) -> None:  # noqa: B027 - most stores hold nothing
        """Release the store's resources, such as a connection. Idempotent."""

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _title(self) -> str:
        """This store's name in messages: `the store at host:port`."""
        return f"this {type(self).__name__}"

    def _keys_timeout(self, keys: Sequence[str], limit: float) -> StoreTimeoutError:
        few = ", ".join(map(repr, keys[:3]))  # not a thousand
        missing = (
            f"the key {few}" if len(keys) == 1 else f"some of the {len(keys)} keys {few}" + ", ..." * (len(keys) > 3)
        )
        return StoreTimeoutError(
            f"{missing} did not appear within {limit:g} s in {self._title()}; check that the process that sets it is "
            "alive, or wait longer"
        )

    def _barrier_timeout(self, key: str, world_size: int, limit: float) -> StoreTimeoutError:
        return StoreTimeoutError(
            f"not all of the {world_size} processes reached the barrier {key!r} within {limit:g} s in {self._title()}; "
            "find out which of them is missing, or wait longer"
        )


_NO_QUEUES = "{} has no queues; use a TCPStore or a HashStore"


def seconds(timeout: timedelta | float) -> float:
    """Convert a timeout to seconds. Raises UserError if it is negative or not a number."""
    value = float(timeout) if isinstance(timeout, int | float) else timeout.total_seconds()
    if not value >= 0:
        raise UserError(f"the store timeout cannot be {value:g} s; use 0 or more seconds")
    return value


def key_bytes(key: str) -> bytes:
    """Encode a key as stored, before any prefix. Bytes that `key_text` could not decode are restored unchanged."""
    return key.encode("utf-8", "surrogateescape")


def key_text(key: bytes) -> str:
    """Decode a stored key; bytes that are not UTF-8 become lone surrogates."""
    return key.decode("utf-8", "surrogateescape")


def value_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def pairs(keys: Sequence[str], values: Sequence[str | bytes]) -> Iterator[tuple[str, bytes]]:
    """Pair each key with its value. Raises UserError unless each key has one."""
    if len(keys) != len(values):
        raise UserError(f"multi_set got {len(keys)} keys and {len(values)} values; pass one value per key")
    return zip(keys, map(value_bytes, values), strict=True)


def increased(key: str, present: bytes | None, amount: int) -> bytes:
    """Add `amount` to a decimal number; None counts as 0. Raises UserError if the value is not a number."""
    try:
        return b"%d" % (int(present or b"0") + amount)
    except ValueError:
        shown = (present or b"")[:40]
        raise UserError(f"the value {shown!r} of key {key!r} is not a number, so nothing can be added to it") from None


def torch_module() -> Any:
    """Return the module `torch.distributed`. Raises UserError if it is not imported."""
    module: Any = sys.modules.get("torch.distributed")
    if getattr(module, "Store", None) is None:
        raise UserError("torch.distributed is not imported, so no torch store can be created; import it first")
    return module


def if_torch_is_imported(store: Any) -> Any:
    """`store.to_torch()`, or the store itself if torch is not imported."""
    return store if getattr(sys.modules.get("torch.distributed"), "Store", None) is None else store.to_torch()


def forwarding_store(store: object) -> Any:
    """Create a torch store that forwards every call to `store`. Raises UserError if torch is not imported."""
    store_of_torch = _class_below(torch_module().Store)(store)
    _keepalive.append(store_of_torch)
    return store_of_torch


_keepalive: list[object] = []
"""torch's C++ does not keep the Python half of such a store alive, and fails without it. So we do, until the process
ends."""

_classes: dict[type, type] = {}


def _class_below(base: type) -> Any:
    """The class of forwarding stores, created once torch is imported."""
    if base not in _classes:
        _classes[base] = type("ForwardingStore", (base,), {"__init__": _init, **{name: _call(name) for name in _CALLS}})
    return _classes[base]


def _init(self: Any, store: object) -> None:
    base: Any = type(self).__mro__[1]
    base.__init__(self)
    self.ours = store


def _call(name: str) -> Any:
    def call(self: Any, *arguments: Any) -> Any:
        plain = [argument.total_seconds() if isinstance(argument, timedelta) else argument for argument in arguments]
        return getattr(self.ours, name)(*plain)

    return property(lambda self: self.ours.timeout) if name == "timeout" else call


_CALLS = (
    *("set", "get", "compare_set", "add", "check", "wait", "append", "multi_get", "multi_set", "delete_key"),
    *("num_keys", "list_keys", "queue_push", "queue_pop", "queue_len", "barrier", "has_extended_api"),
    *("set_timeout", "timeout"),
)


T = TypeVar("T")
Receive: TypeAlias = Callable[[int], bytes]
"""Returns exactly this many bytes of the reply."""

_MAX_REPLY = 1 << 40
"""Length of a value or a number of keys above which a reply must be wrong. APPEND can exceed MAX_PAYLOAD."""


class RequestStore(Store):
    """A store whose operations are `wire` requests, with a slash before each key, as torch's clients send them.

    Subclasses only implement how to answer a request: from a server (`client`) or a table (`plain.HashStore`).
    """

    @abstractmethod
    def _exchange(self, read: Callable[[Receive], T], op: Op, *fields: Any) -> T:
        """Make a request and read its reply."""

    @abstractmethod
    def _await(self, timeout: float, op: Op, *fields: Any) -> bool:
        """Make a request that is answered after an event; False if `timeout` seconds pass first."""

    def set(self, key: str, value: str | bytes) -> None:
        self._exchange(_read_nothing, Op.SET, with_slash(key), value_bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._exchange(read_value, Op.GET, with_slash(key))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        values = value_bytes(expected), value_bytes(desired)
        return self._exchange(read_value, Op.COMPARE_SET, with_slash(key), *values)

    def add(self, key: str, amount: int) -> int:
        return self._exchange(read_number, Op.ADD, with_slash(key), amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._exchange(_flag, Op.CHECK, list(map(with_slash, keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        limit = self._seconds(timeout)
        self._wait(keys, limit, limit)

    def append(self, key: str, value: str | bytes) -> None:
        self._exchange(_read_nothing, Op.APPEND, with_slash(key), value_bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.wait(keys)

        def read(receive: Receive) -> list[bytes]:
            return [read_value(receive) for _ in keys]

        return self._exchange(read, Op.MULTI_GET, list(map(with_slash, keys)))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._exchange(_read_nothing, Op.MULTI_SET, [(with_slash(key), value) for key, value in pairs(keys, values)])

    def delete_key(self, key: str) -> bool:
        return self._exchange(read_number, Op.DELETE_KEY, with_slash(key)) == 1

    def num_keys(self) -> int:
        return self._exchange(read_number, Op.NUM_KEYS)

    def list_keys(self) -> list[str]:
        keys = self._exchange(_values, Op.LIST_KEYS)
        return [key_text(key[1:]) for key in keys if key.startswith(b"/")]

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._exchange(_read_nothing, Op.QUEUE_PUSH, with_slash(key), value_bytes(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        deadline = Deadline.after(self._timeout)
        while True:
            if block:
                self._wait([key], deadline.remaining(), self._timeout)
            value = self._exchange(_read_queue_pop, Op.QUEUE_POP, with_slash(key))
            if value is not None:
                return value
            if not block:
                raise QueueEmptyError(f"the queue {key!r} is empty in {self._title()}")
            # Another caller popped the value that both saw: wait for the next one.

    def queue_len(self, key: str) -> int:
        return self._exchange(read_number, Op.QUEUE_LEN, with_slash(key))

    def barrier(self, key: str, world_size: int, timeout: timedelta | float | None = None) -> None:
        limit = self._seconds(timeout)
        if not self._await(limit, Op.BARRIER, with_slash(key), world_size):
            raise self._barrier_timeout(key, world_size, limit)

    def _wait(self, keys: Sequence[str], remaining: float, timeout: float) -> None:
        if not self._await(remaining, Op.WAIT, list(map(with_slash, keys))):
            raise self._keys_timeout(keys, timeout)


def with_slash(key: str) -> bytes:
    return b"/" + key_bytes(key)


def _read_nothing(_receive: Receive) -> None:
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
        raise StoreProtocolError(f"the store answered CHECK with {answer!r}, which violates the protocol")
    return answer == DONE


def _checked_length(size: int) -> int:
    if size > _MAX_REPLY:
        raise StoreProtocolError(f"the reply claims a length of {size}, so it is not a store reply")
    return size
