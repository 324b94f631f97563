"""The common behavior of all stores, and of torch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rallypoint.base.errors import UserError
from rallypoint.store.api import Store
from rallypoint.store.client import TCPStore
from rallypoint.store.errors import QueueEmptyError, StoreTimeoutError
from rallypoint.store.filestore import FileStore
from rallypoint.store.plain import HashStore
from rallypoint.store.prefix import PrefixStore
from rallypoint.store.server import StoreServer
from tests.conformance.store_pairs import client, serving, torch_stores
from tests.waiting import in_thread

SHORT, LONG = timedelta(seconds=0.05), timedelta(seconds=30)
KINDS = ["tcp", "hash", "file", "prefix-tcp", "prefix-hash", "prefix-file"]
BESIDE_TORCH = {
    **{f"torch's client, server {server}": ("torch", server) for server in ("compiled", "python", "torch")},
    "torch's server": ("ours", "torch"),
}
IN_MEMORY = ["torch-hash", "torch-prefix-hash"]
"""Torch's own stores, to check the tests themselves."""


@pytest.fixture(
    name="store",
    params=[
        *KINDS,
        *(pytest.param(kind, marks=[pytest.mark.process, pytest.mark.torch]) for kind in (*BESIDE_TORCH, *IN_MEMORY)),
    ],
)
def _store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    kind = str(request.param)
    with ExitStack() as stack:
        if kind in BESIDE_TORCH:
            whose, server = BESIDE_TORCH[kind]
            yield client(whose, stack.enter_context(serving(server)))
        elif kind in IN_MEMORY:
            store = torch_stores().HashStore()
            yield torch_stores().PrefixStore("pre", store) if "prefix" in kind else store
        else:
            store = stack.enter_context(made(kind.removeprefix("prefix-"), tmp_path))
            yield PrefixStore("pre", store) if kind.startswith("prefix") else store


@contextmanager
def made(kind: str, folder: Path) -> Iterator[Store]:

    if kind == "tcp":
        with StoreServer("127.0.0.1") as server, TCPStore("127.0.0.1", server.port, timeout=LONG) as store:
            yield store
    else:
        yield FileStore(str(folder / "store"), timeout=LONG) if kind == "file" else HashStore(LONG)


ours = pytest.mark.parametrize("store", KINDS, indirect=True)


def is_ours(store: Any) -> bool:
    return isinstance(store, Store)


def close(store: Any) -> None:
    """Torch's close when nobody holds them any more."""
    if is_ours(store):
        store.close()


def times_out(store: Any, words: str = ".") -> Any:
    """Expect a timeout, with our type and message for our stores."""
    return pytest.raises(StoreTimeoutError, match=words) if is_ours(store) else pytest.raises(RuntimeError)


@pytest.mark.parametrize("value", [b"", b"v", bytes(range(256)), b"x" * 100_000])
def test_set_and_get(store: Any, value: bytes) -> None:
    store.set("key", value)
    assert store.get("key") == value
    store.set("key", "text ü")
    assert store.get("key") == "text ü".encode()


def test_get_waits(store: Any) -> None:
    if is_ours(store):
        store.set_timeout(float("inf"))
    other = store.clone()
    got = in_thread(lambda: other.get("key"))
    store.set("key", b"v")
    assert got() == b"v"
    close(other)


def test_get_times_out(store: Any) -> None:
    store.set_timeout(SHORT)
    assert store.timeout == SHORT
    with times_out(store, r"the key '(pre/)?missing' did not appear within 0.05 s"):
        store.get("missing")
    store.set("key", b"v")
    assert store.get("key") == b"v"


def test_compare_set(store: Any) -> None:
    assert store.compare_set("key", "x", "y") == b"x"
    assert not store.check(["key"])
    assert store.compare_set("key", "", "y") == b"y"
    assert store.compare_set("key", "x", "z") == b"y"
    assert store.compare_set("key", b"y", b"") == b""
    assert store.compare_set("key", "", "last") == b"last"
    assert store.get("key") == b"last"


def test_add(store: Any) -> None:
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"
    store.set("m", "41")
    assert store.add("m", 1) == 42


def test_check_and_wait(store: Any) -> None:
    store.set("a", "")
    assert store.check([])
    assert store.check(["a"])
    assert not store.check(["a", "b"])
    store.wait([])
    store.wait(["a"], SHORT)
    with times_out(store, r"some of the 4 keys '.*a', '.*b', '.*c', \.\.\. did not appear"):
        store.wait(["a", "b", "c", "d"], SHORT)
    if is_ours(store):  # for torch, 0 is no limit
        with times_out(store):
            store.wait(["b"], 0)
    other = store.clone()
    waited = in_thread(lambda: other.wait(["a", "b", "c", "b"]))
    store.set("b", "")
    store.set("c", "")
    assert waited() is None
    close(other)


def test_append_multi_set_and_multi_get(store: Any) -> None:
    store.append("a", "x")
    store.append("a", b"y")
    store.multi_set(["b", "c"], ["1", b"2"])
    other = store.clone()
    got = in_thread(lambda: other.multi_get(["a", "late", "c", "a"]))
    store.set("late", "3")
    assert [bytes(value) for value in got()] == [b"xy", b"3", b"2", b"xy"]
    assert list(store.multi_get([])) == []
    if is_ours(store):
        with pytest.raises(UserError, match="1 keys and 2 values"):
            store.multi_set(["a"], ["1", "2"])
    close(other)


def test_delete_and_list(store: Any) -> None:
    store.set("a", "1")
    store.set("b/c", "2")
    store.set("ü", "3")
    assert store.num_keys() == 3
    assert sorted(store.list_keys()) == ["a", "b/c", "ü"]
    assert store.delete_key("a") is True
    assert store.delete_key("a") is False
    assert not store.check(["a"])
    assert sorted(store.list_keys()) == ["b/c", "ü"]


def test_queues(store: Any) -> None:
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
    with pytest.raises(
        QueueEmptyError if is_ours(store) else RuntimeError, match="q' is empty" if is_ours(store) else "empty"
    ):
        store.queue_pop("q", block=False)
    other = store.clone()
    popped = in_thread(lambda: other.queue_pop("q"))
    store.queue_push("q", b"late")
    assert popped() == b"late"
    close(other)


def test_barrier(store: Any) -> None:
    others = [store.clone() for _ in range(3)]
    passed = [in_thread(lambda other=other: other.barrier("b", 4, LONG)) for other in others]  # type: ignore[misc]
    store.barrier("b", 4, LONG)
    assert [wait() for wait in passed] == [None] * 3
    store.barrier("b", 4, LONG)
    with times_out(store, r"not all of the 9 processes reached the barrier '(pre/)?x' within 0.05 s"):
        store.barrier("x", 9, SHORT)
    for other in others:
        close(other)


@ours
@pytest.mark.parametrize("timeout", [-1, float("nan"), timedelta(seconds=-1)])
def test_invalid_timeouts(store: Store, timeout: float | timedelta) -> None:
    with pytest.raises(UserError, match="timeout"):
        store.set_timeout(timeout)
