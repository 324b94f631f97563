"""The store in memory, and prefix stores (contract section 9.6)."""

from __future__ import annotations

import pytest

from rallypoint.base.errors import RallypointError, UserError
from rallypoint.store.plain import MERGE_LIMIT, HashStore, Table, _Shared
from rallypoint.store.prefix import PrefixStore
from tests.waiting import in_thread


def test_adding_to_text_is_refused() -> None:
    store = HashStore()
    store.set("k", "abc")
    with pytest.raises(UserError, match="not a number"):
        store.add("k", 1)
    with pytest.raises(UserError, match="not a number"):
        store.barrier("k", 2)
    assert store.get("k") == b"abc"


def test_threads_share_a_queue() -> None:
    store = HashStore(30)
    pops = [in_thread(lambda: store.clone().queue_pop("q")) for _ in range(8)]
    for number in range(8):
        store.queue_push("q", str(number))
    assert sorted(pop() for pop in pops) == [b"%d" % number for number in range(8)]


def test_large_values_are_not_copied() -> None:
    table: Table[str] = Table()
    value = bytes(MERGE_LIMIT + 1)
    table.set("A", b"k", value)
    assert [reply for _, reply in table.multi_get("A", [b"k", b"k"]) if reply is value] == [value, value]


def test_timed_out_waits_are_forgotten() -> None:
    shared = _Shared()
    store = HashStore(_shared=shared)
    for _ in range(3):
        with pytest.raises(RallypointError, match="never"):
            store.wait(["never"], 0.001)
    assert not shared.table.lines
    assert not shared.table.missing


def test_prefixes() -> None:
    root = HashStore(7)
    inner = PrefixStore("pre", root)
    outer = PrefixStore("outer", inner)
    outer.set("y", "v")
    assert root.list_keys() == ["pre/outer/y"]
    assert outer.underlying_store is inner
    assert outer._underlying_non_prefix_store is root
    root.set("pref/k", "")
    assert (inner.list_keys(), inner.num_keys()) == (["outer/y"], 2), "all keys are counted"
    assert inner.timeout == root.timeout
    outer.set_timeout(9)
    assert root.timeout.total_seconds() == inner.clone().timeout.total_seconds() == 9
