"""Protocol buffers and etcd's messages, without etcd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.control.etcd import messages
from rallypoint.control.etcd.api import Compare, Operation, Put, Range
from rallypoint.control.etcd.messages import (
    DecodingError,
    Fields,
    RequestOutcome,
    classify,
    fields,
    message,
    number,
    string,
)

DECODERS: list[Callable[[bytes], object]] = [
    messages.decode_range,
    lambda data: messages.decode_txn(data, [], [Range(b"k")]),
    messages.decode_lease,
    messages.decode_token,
    messages.decode_status,
    messages.decode_watch,
]

int64 = st.integers(-(2**63), 2**63 - 1)
field_numbers = st.integers(1, 2**20)


@given(st.lists(st.tuples(field_numbers, int64 | st.binary())))
def test_fields_are_read_as_written(written: list[tuple[int, int | bytes]]) -> None:
    data = b"".join(
        message(field, value) if isinstance(value, bytes) else number(field, value) for field, value in written
    )
    expected = [
        (field, value if isinstance(value, bytes) else value % 2**64)
        for field, value in written
        if isinstance(value, bytes) or value
    ]
    assert list(fields(data)) == expected


@given(field_numbers, int64)
def test_numbers_keep_their_sign(field: int, value: int) -> None:
    assert Fields(number(field, value)).number(field) == value


def test_known_bytes() -> None:
    assert number(1, 150) == bytes.fromhex("089601")
    assert number(1, 0) == string(2, b"") == b""
    assert string(2, b"testing") == bytes.fromhex("120774657374696e67")
    assert message(3, number(1, 150)) == bytes.fromhex("1a03089601")
    assert number(2, -1) == bytes.fromhex("10ffffffffffffffffff01")
    fixed_widths = bytes.fromhex("0d01020304") + bytes.fromhex("110102030405060708")
    assert list(fields(fixed_widths + number(3, 7))) == [(3, 7)]
    zero = messages.encode_txn([Compare(b"k", "create_revision", "==", 0)], [], [])
    assert 5 in Fields(Fields(zero).string(1)), "an operand of 0 is encoded"


@pytest.mark.parametrize("data", [b"\x08", b"\x0a\x05abc", b"\x0b", b"\x09abc", b"\xff" * 11])
def test_incomplete_messages_are_refused(data: bytes) -> None:
    with pytest.raises(DecodingError):
        list(fields(data))


@given(st.binary(max_size=4), st.binary(max_size=6))
def test_a_range_is_exactly_its_prefix(prefix: bytes, key: bytes) -> None:
    begin, end = messages.range_end(prefix, prefix=True)
    within = begin <= key and (end == b"\0" or key < end)
    if key:  # no key is empty
        assert within == key.startswith(prefix)


def test_errors_are_classified() -> None:
    for problem in ("leader changed", "request timed out", "no leader"):
        assert classify(14, f"etcdserver: {problem}", named=True).outcome is RequestOutcome.RETRY
    assert classify(3, "something new", named=True).outcome is RequestOutcome.REFUSED
    assert classify(12, "unknown service", named=True).problem == "does not speak the v3 API of etcd"


@pytest.mark.parametrize("succeeded", [True, False])
def test_a_transaction_s_answers_must_fit_its_operations(succeeded: bool) -> None:
    """Callers rely on answers that fit the request, whatever listens at the endpoint."""
    found, stored = message(3, message(1, b"")), message(3, message(2, b""))
    then: list[Operation] = [Put(b"k", b"v"), Range(b"k")]
    for answers, fits in ((stored + found, True), (found + stored, False), (stored, False), (b"", False)):
        data = number(2, int(succeeded)) + answers
        asked = (then, []) if succeeded else ([], then)
        if fits:
            assert messages.decode_txn(data, *asked).succeeded is succeeded
            continue
        with pytest.raises(DecodingError, match="do not match the operations"):
            messages.decode_txn(data, *asked)
