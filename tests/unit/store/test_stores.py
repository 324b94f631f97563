"""Common behavior of all stores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest

from rallypoint.base.errors import UserError
from rallypoint.store.api import Store
from rallypoint.store.client import TCPStore
from rallypoint.store.errors import QueueEmptyError, StoreTimeoutError
from rallypoint.store.filestore import FileStore
from rallypoint.store.plain import HashStore
from rallypoint.store.prefix import PrefixStore
from rallypoint.store.server import StoreServer

T = TypeVar("T")

SHORT = 0.05
KINDS = ["tcp", "hash", "file", "prefix-tcp", "prefix-hash", "prefix-file"]


@pytest.fixture(name="store", params=KINDS)
def _store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    kind = str(request.param)
    server = StoreServer("127.0.0.1") if kind.endswith("tcp") else None
    store: Store
    if server is not None:
        store = TCPStore("127.0.0.1", server.port, timeout=30)
    elif kind.endswith("file"):
        store = FileStore(str(tmp_path / "store"), timeout=30)
    else:
        store = HashStore(30)
    if kind.startswith("prefix"):
        store = PrefixStore("pre", store)
    yield store
    store.close()
    if server is not None:
        server.close()


def in_thread(function: Callable[[], T]) -> Callable[[], T]:
    """Start a function on a thread; gives a function that waits for its result."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()

    def result() -> T:
        thread.join(30)
        return results[0]

    return result


@pytest.mark.parametrize("value", [b"", b"v", bytes(range(256)), b"x" * 100_000])
def test_what_is_set_is_got(store: Store, value: bytes) -> None:
    store.set("key", value)
    assert store.get("key") == value
    store.set("key", "text ü")
    assert store.get("key") == "text ü".encode()


def test_get_waits(store: Store) -> None:
    other = store.clone()
    got = in_thread(lambda: other.get("key"))
    store.set("key", b"v")
    assert got() == b"v"
    other.close()


def test_get_gives_up_and_the_store_goes_on(store: Store) -> None:
    store.set_timeout(timedelta(seconds=SHORT))
    assert store.timeout == timedelta(seconds=SHORT)
    with pytest.raises(StoreTimeoutError, match=r"the key '(pre/)?missing' did not appear within 0.05 s"):
        store.get("missing")
    store.set("key", b"v")
    assert store.get("key") == b"v"


def test_compare_set(store: Store) -> None:
    assert store.compare_set("key", "x", "y") == b"x"
    assert not store.check(["key"])
    assert store.compare_set("key", "", "y") == b"y"
    assert store.compare_set("key", "x", "z") == b"y"
    assert store.compare_set("key", b"y", b"") == b""
    assert store.compare_set("key", "", "last") == b"last"
    assert store.get("key") == b"last"


def test_add(store: Store) -> None:
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"
    store.set("m", "41")
    assert store.add("m", 1) == 42


def test_check_and_wait(store: Store) -> None:
    store.set("a", "")
    assert store.check([])
    assert store.check(["a"])
    assert not store.check(["a", "b"])
    store.wait([])
    store.wait(["a"], timedelta(seconds=SHORT))
    with pytest.raises(StoreTimeoutError, match=r"some of the 4 keys '.*a', '.*b', '.*c', \.\.\. did not appear"):
        store.wait(["a", "b", "c", "d"], SHORT)
    with pytest.raises(StoreTimeoutError):
        store.wait(["b"], 0)
    other = store.clone()
    waited = in_thread(lambda: other.wait(["a", "b", "c", "b"]))
    store.set("b", "")
    store.set("c", "")
    assert waited() is None
    other.close()


def test_append_and_many_at_once(store: Store) -> None:
    store.append("a", "x")
    store.append("a", b"y")
    store.multi_set(["b", "c"], ["1", b"2"])
    assert store.multi_get(["a", "b", "c", "a"]) == [b"xy", b"1", b"2", b"xy"]
    assert store.multi_get([]) == []
    with pytest.raises(UserError, match="1 keys and 2 values"):
        store.multi_set(["a"], ["1", "2"])


def test_delete_and_list(store: Store) -> None:
    store.set("a", "1")
    store.set("b/c", "2")
    store.set("ü", "3")
    assert store.num_keys() == 3
    assert sorted(store.list_keys()) == ["a", "b/c", "ü"]
    assert store.delete_key("a") is True
    assert store.delete_key("a") is False
    assert not store.check(["a"])
    assert sorted(store.list_keys()) == ["b/c", "ü"]


def test_queues(store: Store) -> None:
    if isinstance(getattr(store, "underlying_store", store), FileStore):
        for use in (lambda: store.queue_push("q", "1"), lambda: store.queue_pop("q"), lambda: store.queue_len("q")):
            with pytest.raises(NotImplementedError, match="HashStore"):
                use()
        assert not store.has_extended_api()
        return
    assert store.has_extended_api()
    store.queue_push("q", "1")
    store.queue_push("q", b"")
    assert store.queue_len("q") == 2
    assert store.check(["q"])
    assert store.queue_pop("q") == b"1"
    assert store.queue_pop("q", block=False) == b""
    assert store.queue_len("q") == 0
    with pytest.raises(QueueEmptyError, match="q' is empty"):
        store.queue_pop("q", block=False)
    other = store.clone()
    popped = in_thread(lambda: other.queue_pop("q"))
    store.queue_push("q", b"late")
    assert popped() == b"late"
    other.close()


def test_barrier(store: Store) -> None:
    others = [store.clone() for _ in range(3)]
    passed = [in_thread(lambda other=other: other.barrier("b", 4)) for other in others]  # type: ignore[misc]
    store.barrier("b", 4)
    assert [wait() for wait in passed] == [None] * 3
    store.barrier("b", 4)
    with pytest.raises(StoreTimeoutError, match=r"not all of 9 reached the barrier '(pre/)?x' within 0.05 s"):
        store.barrier("x", 9, SHORT)
    for other in others:
        other.close()


@pytest.mark.parametrize("timeout", [-1, float("nan"), timedelta(seconds=-1)])
def test_a_timeout_that_cannot_be_meant(store: Store, timeout: float | timedelta) -> None:
    with pytest.raises(UserError, match="timeout"):
        store.set_timeout(timeout)


def test_no_timeout_at_all(store: Store) -> None:
    store.set_timeout(float("inf"))
    other = store.clone()
    got = in_thread(lambda: other.get("key"))
    store.set("key", b"v")
    assert got() == b"v"
    other.close()
