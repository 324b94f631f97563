"""The table against a dumb twin, and the surprising rows of contract section 9.3 one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.store import wire
from rallypoint.store.errors import StoreProtocolError
from rallypoint.store.table import JOINED, Table
from tests.unit.store.requests import REQUESTS

Replies = list[tuple[str, bytes]]


class Twin:
    """The same rules in the plainest form: waiters in the order in which they came, each with what it still misses."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, list[bytes]] = {}
        self.waiters: list[tuple[str, list[bytes]]] = []

    def execute(self, client: str, request: wire.Request) -> Replies:
        """The replies of the real table, by `match`."""
        values, queues = self.values, self.queues
        match request:
            case wire.Set(key, value):
                values[key] = value
                return self.changed(key)
            case wire.MultiSet(pairs):
                return [reply for key, value in pairs for reply in self.execute(client, wire.Set(key, value))]
            case wire.Append(key, value):
                values[key] = values.get(key, b"") + value
                return self.changed(key)
            case wire.CompareSet(key, expected, desired):
                if values.get(key, b"") == expected:
                    values[key] = desired
                return [*self.changed(key), (client, wire.string(values.get(key, expected)))]
            case wire.Get(key):
                return [(client, wire.string(values.get(key, b"")))]
            case wire.MultiGet(keys):
                return [(client, wire.string(values.get(key, b""))) for key in keys]
            case wire.Add(key, delta):
                total = self.add(key, delta)
                return [*self.changed(key), (client, wire.I64.pack(total))]
            case wire.Check(keys):
                return [(client, b"\0" if all(key in values or queues.get(key) for key in keys) else b"\1")]
            case wire.Wait(keys):
                if all(key in values or queues.get(key) for key in keys):
                    return [(client, b"\0")]
                self.leave(client)
                self.waiters.append((client, [key for key in keys if key not in values]))
                return []
            case _:
                return self.execute_rest(client, request)

    def execute_rest(self, client: str, request: wire.Request) -> Replies:
        """The other half, for `execute` fits no screen."""
        values, queues = self.values, self.queues
        match request:
            case wire.NumKeys():
                return [(client, wire.I64.pack(len(values)))]
            case wire.DeleteKey(key):
                return [(client, wire.I64.pack(int(values.pop(key, None) is not None)))]
            case wire.CancelWait():
                self.leave(client)
                return [(client, b"\1")]
            case wire.Ping(nonce):
                return [(client, wire.U32.pack(nonce))]
            case wire.QueuePush(key, value):
                queues.setdefault(key, []).append(value)
                return self.pushed(key)
            case wire.QueuePop(key):
                length = wire.I64.pack(len(queues.get(key, [])))
                return [(client, length + wire.string(queues[key].pop(0)) if queues.get(key) else length)]
            case wire.QueueLen(key):
                return [(client, wire.I64.pack(len(queues.get(key, []))))]
            case wire.ListKeys():
                return [(client, wire.strings(list(values)))]
            case wire.Barrier(key, world_size):
                if self.add(key, 1) >= world_size:
                    return [*self.changed(key), (client, b"\0")]
                self.leave(client)
                self.waiters.append((client, [key]))
                return []
            case _:
                raise AssertionError(request)

    def add(self, key: bytes, delta: int) -> int:
        total = strtoll(self.values[key]) + delta if key in self.values else delta
        while total >= 1 << 63:
            total -= 1 << 64
        while total < -(1 << 63):
            total += 1 << 64
        self.values[key] = str(total).encode()
        return total

    def changed(self, key: bytes) -> Replies:
        for _, missing in self.waiters:
            missing[:] = [name for name in missing if name != key]
        woken = [client for client, missing in self.waiters if not missing]
        self.waiters = [waiter for waiter in self.waiters if waiter[1]]
        return [(client, b"\0") for client in woken]

    def pushed(self, key: bytes) -> Replies:
        for waiter in self.waiters:
            client, missing = waiter
            missing[:] = [name for name in missing if name != key]
            if not missing:
                self.waiters.remove(waiter)
                return [(client, b"\0")]
        return []

    def leave(self, client: str) -> None:
        self.waiters = [waiter for waiter in self.waiters if waiter[0] != client]


def strtoll(text: bytes) -> int:
    """C's strtoll as far as it concerns us, character by character; raises where it could not read a number."""
    rest = text.decode("latin-1").lstrip(" \t\n\v\f\r")
    sign = rest[:1] if rest[:1] in {"+", "-"} else ""
    digits = ""
    for char in rest[len(sign) :]:
        if char not in "0123456789":
            break
        digits += char
    number = int(sign + digits) if digits else 1 << 63
    if not -(1 << 63) <= number < 1 << 63:
        raise StoreProtocolError("no number")
    return number


def joined(replies: Iterable[tuple[str, bytes]]) -> Replies:
    """Replies with consecutive ones to the same client put together."""
    merged: Replies = []
    for client, reply in replies:
        if merged and merged[-1][0] == client:
            merged[-1] = (client, merged[-1][1] + reply)
        elif reply:
            merged.append((client, reply))
    return merged


CLIENTS = st.sampled_from(["A", "B", "C"])
STEPS = st.lists(st.tuples(CLIENTS, st.one_of(REQUESTS, st.none())), max_size=40)

FEW = st.sampled_from([b"a", b"b"])
WAITING = st.one_of(
    st.builds(wire.Wait, st.lists(FEW, max_size=3)),
    st.builds(wire.Set, FEW, st.just(b"")),
    st.builds(wire.DeleteKey, FEW),
    st.builds(wire.QueuePush, FEW, st.just(b"")),
    st.builds(wire.QueuePop, FEW),
    st.builds(wire.Barrier, FEW, st.integers(1, 3)),
    st.builds(wire.CancelWait),
    st.none(),
)
WAITING_STEPS = st.lists(st.tuples(CLIENTS, WAITING), max_size=30)


@given(st.one_of(STEPS, WAITING_STEPS))
@settings(max_examples=400)
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
                table.execute(client, request)
            continue
        assert joined(table.execute(client, request)) == joined(expected)


@pytest.fixture(name="table")
def _table() -> Table[str]:
    return Table()


def test_a_failed_compare_set_on_a_missing_key_lies_and_wakes(table: Table[str]) -> None:
    table.execute("W", wire.Wait([b"k"]))
    assert joined(table.execute("A", wire.CompareSet(b"k", b"x", b"y"))) == [("W", b"\0"), ("A", wire.string(b"x"))]
    assert table.execute("A", wire.Check([b"k"])) == [("A", b"\1")]


def test_a_push_wakes_the_first_who_has_all_and_counts_for_those_before(table: Table[str]) -> None:
    table.execute("A", wire.Wait([b"q", b"x"]))
    table.execute("B", wire.Wait([b"q"]))
    table.execute("C", wire.Wait([b"q"]))
    assert table.execute("P", wire.QueuePush(b"q", b"")) == [("B", b"\0")]
    assert table.execute("P", wire.Set(b"x", b"")) == [("A", b"\0")]
    assert table.execute("P", wire.QueuePush(b"q", b"")) == [("C", b"\0")]


def test_a_wait_for_a_queue_and_a_missing_key_counts_both(table: Table[str]) -> None:
    table.execute("P", wire.QueuePush(b"q", b""))
    assert table.execute("A", wire.Wait([b"q", b"x"])) == []
    assert table.execute("P", wire.Set(b"x", b"")) == []
    assert table.execute("P", wire.QueuePush(b"q", b"")) == [("A", b"\0")]


def test_a_barrier_short_of_its_world_wakes_no_waiter_of_its_key(table: Table[str]) -> None:
    table.execute("W", wire.Wait([b"b"]))
    assert table.execute("A", wire.Barrier(b"b", 2)) == []
    assert sorted(table.execute("B", wire.Barrier(b"b", 2))) == [("A", b"\0"), ("B", b"\0"), ("W", b"\0")]
    assert table.execute("C", wire.Barrier(b"b", 2)) == [("C", b"\0")]
    assert table.execute("C", wire.Get(b"b")) == [("C", wire.string(b"3"))]


def test_who_has_left_gets_nothing(table: Table[str]) -> None:
    table.execute("A", wire.Wait([b"k", b"k", b"l"]))
    table.execute("B", wire.Wait([b"k"]))
    table.forget("A")
    table.forget("A")
    assert table.execute("C", wire.Set(b"k", b"")) == [("B", b"\0")]
    assert table.execute("C", wire.Set(b"l", b"")) == []


def test_large_values_are_handed_out_as_they_are_kept(table: Table[str]) -> None:
    value = bytes(JOINED + 1)
    table.execute("A", wire.Set(b"k", value))
    replies = table.execute("A", wire.MultiGet([b"k", b"k"]))
    assert [reply for _, reply in replies if reply is value] == [value, value]


def test_a_value_that_grows_later_does_not_change_the_replies_before(table: Table[str]) -> None:
    table.execute("A", wire.Append(b"k", bytes(JOINED)))
    table.execute("A", wire.Append(b"k", b"x"))
    (_, (_, sent)) = table.execute("A", wire.Get(b"k"))
    table.execute("A", wire.Append(b"k", b"y"))
    assert sent == bytes(JOINED) + b"x"
