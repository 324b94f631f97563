"""The table against a dumb twin, and the surprising rows of contract section 9.3 one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.store.errors import StoreProtocolError
from rallypoint.store.table import MERGE_LIMIT, Table
from tests import typed_requests as wire
from tests.effort import examples
from tests.unit.store.reference import STEPS, WAITING_STEPS, Replies, Twin


def joined(replies: Iterable[tuple[str, bytes]]) -> Replies:
    """Replies with consecutive ones to the same client put together."""
    merged: Replies = []
    for client, reply in replies:
        if merged and merged[-1][0] == client:
            merged[-1] = (client, merged[-1][1] + reply)
        elif reply:
            merged.append((client, reply))
    return merged


@given(st.one_of(STEPS, WAITING_STEPS))
@settings(max_examples=examples(400))
def test_the_table_does_what_its_dumb_twin_does(steps: Sequence[tuple[str, wire.Request | None]]) -> None:
    table: Table[str] = Table()
    twin = Twin()
    for client, request in steps:
        if request is None:
            table.forget(client)
            twin.leave(client)
            continue
        try:
            expected = twin.execute(client, request)
        except StoreProtocolError:
            with pytest.raises(StoreProtocolError, match="not a number"):
                wire.execute(table, client, request)
            continue
        found = joined(wire.execute(table, client, request))
        if isinstance(request, wire.ListKeys):  # in no order
            assert [sorted(reply) for _, reply in found] == [sorted(reply) for _, reply in expected]
        else:
            assert found == joined(expected)


@pytest.fixture(name="table")
def _table() -> Table[str]:
    return Table()


def test_a_failed_compare_set_on_a_missing_key_lies_and_wakes(table: Table[str]) -> None:
    wire.execute(table, "W", wire.Wait([b"k"]))
    assert joined(wire.execute(table, "A", wire.CompareSet(b"k", b"x", b"y"))) == [
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
    assert (table.keys, table.bytes) == (0, 0)


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


def test_who_has_left_gets_nothing(table: Table[str]) -> None:
    wire.execute(table, "A", wire.Wait([b"k", b"k", b"l"]))
    wire.execute(table, "B", wire.Wait([b"k"]))
    table.forget("A")
    table.forget("A")
    assert wire.execute(table, "C", wire.Set(b"k", b"")) == [("B", b"\0")]
    assert wire.execute(table, "C", wire.Set(b"l", b"")) == []


def test_large_values_are_handed_out_as_they_are_kept(table: Table[str]) -> None:
    value = bytes(MERGE_LIMIT + 1)
    wire.execute(table, "A", wire.Set(b"k", value))
    replies = wire.execute(table, "A", wire.MultiGet([b"k", b"k"]))
    assert [reply for _, reply in replies if reply is value] == [value, value]


def test_a_value_that_grows_later_does_not_change_the_replies_before(table: Table[str]) -> None:
    wire.execute(table, "A", wire.Append(b"k", bytes(MERGE_LIMIT)))
    wire.execute(table, "A", wire.Append(b"k", b"x"))
    (_, (_, sent)) = wire.execute(table, "A", wire.Get(b"k"))
    wire.execute(table, "A", wire.Append(b"k", b"y"))
    assert sent == bytes(MERGE_LIMIT) + b"x"
