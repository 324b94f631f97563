"""Behavior of prefix stores alone (contract section 9.6)."""

from __future__ import annotations

from rallypoint.store.plain import HashStore
from rallypoint.store.prefix import PrefixStore


def test_nested_prefixes_stand_from_the_innermost_store_outwards() -> None:
    root = HashStore()
    inner = PrefixStore("pre", root)
    outer = PrefixStore("outer", inner)
    outer.set("y", "v")
    assert root.list_keys() == ["pre/outer/y"]
    assert outer.underlying_store is inner
    assert outer._underlying_non_prefix_store is root


def test_own_keys_are_listed_and_all_keys_counted() -> None:
    root = HashStore()
    store = PrefixStore("a", root)
    store.set("k", "")
    root.set("ab/k", "")
    root.set("b", "")
    assert store.list_keys() == ["k"]
    assert store.num_keys() == 3


def test_the_timeout_is_that_of_the_store_beneath() -> None:
    root = HashStore(7)
    store = PrefixStore("a", root)
    assert store.timeout == root.timeout
    store.set_timeout(9)
    assert root.timeout.total_seconds() == 9
    assert store.clone().timeout.total_seconds() == 9
