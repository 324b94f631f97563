"""Behavior of the store in memory alone."""

from __future__ import annotations

import threading

import pytest

from rallypoint.base.errors import RallypointError, UserError
from rallypoint.store.plain import HashStore, _Shared


def test_adding_to_what_is_no_number() -> None:
    store = HashStore()
    store.set("k", "abc")
    with pytest.raises(UserError, match="not a number"):
        store.add("k", 1)
    with pytest.raises(UserError, match="not a number"):
        store.barrier("k", 2)
    assert store.get("k") == b"abc"


def test_threads_hand_values_over_by_a_queue() -> None:
    store = HashStore(30)
    got: list[bytes] = []
    threads = [threading.Thread(target=lambda: got.append(store.clone().queue_pop("q"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for number in range(8):
        store.queue_push("q", str(number))
    for thread in threads:
        thread.join(30)
    assert sorted(got) == [b"%d" % number for number in range(8)]


def test_nothing_is_left_of_waits_that_timed_out() -> None:
    shared = _Shared()
    store = HashStore(_shared=shared)
    for _ in range(3):
        with pytest.raises(RallypointError, match="never"):
            store.wait(["never"], 0.001)
    assert not shared.table.lines
    assert not shared.table.missing
