"""The surprising rows of contract section 9.3, one by one. `test_both` compares the store in C in all others."""

from __future__ import annotations

import pytest

from rallypoint.store.plain import MERGE_LIMIT, Table
from tests import typed_requests as wire


@pytest.fixture(name="table")
def _table() -> Table[str]:
    return Table()


def test_a_failed_compare_set_on_a_missing_key_lies_and_wakes(table: Table[str]) -> None:
    wire.execute(table, "W", wire.Wait([b"k"]))
    assert wire.execute(table, "A", wire.CompareSet(b"k", b"x", b"y")) == [
        ("W", b"\0"),
        ("A", wire.string(b"x")),
    ]
    assert wire.execute(table, "A", wire.Check([b"k"])) == [("A", b"\1")]


def test_a_push_wakes_the_first_who_has_all_and_counts_for_those_before(table: Table[str]) -> None:
    wire.execute(table, "A", wire.Wait([b"q", b"x"]))
    wire.execute(table, "B", wire.Wait([b"q"]))
    wire.execute(table, "C", wire.Wait([b"q"]))
    assert wire.execute(table, "P", wire.QueuePush(b"q", b"")) == [("B", b"\0")]
    assert wire.execute(table, "P", wire.Set(b"x", b"")) == [("A", b"\0")]
    assert wire.execute(table, "P", wire.QueuePush(b"q", b"")) == [("C", b"\0")]


def test_an_emptied_queue_leaves_nothing(table: Table[str]) -> None:
    wire.execute(table, "P", wire.QueuePush(b"q", b"value"))
    wire.execute(table, "P", wire.QueuePop(b"q"))
    assert not table.queues


def test_a_wait_for_a_queue_and_a_missing_key_counts_both(table: Table[str]) -> None:
    wire.execute(table, "P", wire.QueuePush(b"q", b""))
    assert wire.execute(table, "A", wire.Wait([b"q", b"x"])) == []
    assert wire.execute(table, "P", wire.Set(b"x", b"")) == []
    assert wire.execute(table, "P", wire.QueuePush(b"q", b"")) == [("A", b"\0")]


def test_a_barrier_short_of_its_world_wakes_no_waiter_of_its_key(table: Table[str]) -> None:
    wire.execute(table, "W", wire.Wait([b"b"]))
    assert wire.execute(table, "A", wire.Barrier(b"b", 2)) == []
    assert sorted(wire.execute(table, "B", wire.Barrier(b"b", 2))) == [("A", b"\0"), ("B", b"\0"), ("W", b"\0")]
    assert wire.execute(table, "C", wire.Barrier(b"b", 2)) == [("C", b"\0")]
    assert wire.execute(table, "C", wire.Get(b"b")) == [("C", wire.string(b"3"))]


@pytest.mark.parametrize("later", [wire.Wait([b"l"]), wire.Barrier(b"l", 2)])
def test_a_later_wait_replaces_an_earlier_one(table: Table[str], later: wire.Wait | wire.Barrier) -> None:
    wire.execute(table, "A", wire.Wait([b"k"]))
    wire.execute(table, "A", later)
    assert wire.execute(table, "B", wire.Barrier(b"l", 1)) == [("A", b"\0"), ("B", b"\0")]
    assert wire.execute(table, "B", wire.Set(b"k", b"")) == []


def test_who_has_left_gets_nothing(table: Table[str]) -> None:
    wire.execute(table, "A", wire.Wait([b"k", b"k", b"l"]))
    wire.execute(table, "B", wire.Wait([b"k"]))
    table.forget("A")
    table.forget("A")
    assert list(table.lines) == [b"k"]
    assert wire.execute(table, "C", wire.Set(b"k", b"")) == [("B", b"\0")]
    assert wire.execute(table, "C", wire.Set(b"l", b"")) == []


def test_large_values_are_handed_out_as_they_are_kept(table: Table[str]) -> None:
    value = bytes(MERGE_LIMIT + 1)
    wire.execute(table, "A", wire.Set(b"k", value))
    replies = wire.execute(table, "A", wire.MultiGet([b"k", b"k"]))
    assert [reply for _, reply in replies if reply is value] == [value, value]
