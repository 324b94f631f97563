"""Requests and byte streams for hypothesis, and helpers to compare their results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hypothesis import strategies as st

from rallypoint.store.plain import Decoder
from tests import typed_requests as wire

KEYS = st.sampled_from([b"a", b"b", b"/c", b"", b"init/"])
NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1)
TEXTS = st.sampled_from(
    [
        *(b"", b"0", b"7", b"-3", b"+5", b" \t12abc", b"0x10", b"--1", b"- 1", b"abc", b"007", b"9" * 19, b"1" * 30),
        *(b"%d" % ((1 << 63) - 1), b"%d" % -(1 << 63), b"0" * 40 + b"8", b"\xa05", b"\x0b4", b"1\x002"),
    ]
)
VALUES = st.one_of(TEXTS, st.binary(max_size=40))
KEY_LISTS = st.lists(KEYS, max_size=4)

REQUESTS: st.SearchStrategy[wire.Request] = st.one_of(
    st.builds(wire.Set, KEYS, VALUES),
    st.builds(wire.CompareSet, KEYS, VALUES, VALUES),
    st.builds(wire.Get, KEYS),
    st.builds(wire.Add, KEYS, st.one_of(st.integers(-3, 3), NUMBERS)),
    st.builds(wire.Check, KEY_LISTS),
    st.builds(wire.Wait, KEY_LISTS),
    st.builds(wire.NumKeys),
    st.builds(wire.DeleteKey, KEYS),
    st.builds(wire.Append, KEYS, VALUES),
    st.builds(wire.MultiGet, KEY_LISTS),
    st.builds(wire.MultiSet, st.lists(st.tuples(KEYS, VALUES), max_size=3)),
    st.builds(wire.CancelWait),
    st.builds(wire.Ping, st.integers(0, (1 << 32) - 1)),
    st.builds(wire.QueuePush, KEYS, VALUES),
    st.builds(wire.QueuePop, KEYS),
    st.builds(wire.QueueLen, KEYS),
    st.builds(wire.ListKeys),
    st.builds(wire.Barrier, KEYS, st.integers(-1, 3)),
)

NAMES = ["A", "B", "C"]
CLIENTS = st.sampled_from(NAMES)
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
"""Clients and their requests; a client with None leaves."""


def stream(sent: Iterable[wire.Request]) -> bytes:
    """The bytes of a client that greets and then sends these requests."""
    return wire.encode(wire.Validate()) + b"".join(map(wire.encode, sent))


def arriving(sent: Iterable[wire.Request]) -> list[wire.Request]:
    """The requests as a decoder returns them: MULTI_SET as one SET for each pair."""
    seen: list[wire.Request] = []
    for request in sent:
        if isinstance(request, wire.MultiSet) and request.pairs:
            seen += [wire.Set(key, value) for key, value in request.pairs]
        else:
            seen.append(request)
    return seen


def rest(decoder: Decoder) -> Iterator[wire.Request]:
    """All complete requests."""
    while (request := decoder.next()) is not None:
        yield wire.typed(*request)


def typed(found: Iterable[wire.Request]) -> list[tuple[type, list[object]]]:
    """Requests in a form that is equal only if their types are too."""
    return [
        (type(request), [list(field) if isinstance(field, tuple) else field for field in request]) for request in found
    ]
