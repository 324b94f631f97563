"""A job's keys in etcd: written values are read back; foreign bytes are an error of one sentence."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.errors import UserError
from rallypoint.base.log import printable
from rallypoint.control.election.keys import (
    ElectionKeys,
    LeaderRecord,
    StoredSnapshot,
    decode_leader,
    decode_node,
    decode_snapshot,
    encode_leader,
    encode_node,
    encode_snapshot,
    state_of,
)
from rallypoint.control.etcd.api import KeyValue
from rallypoint.control.membership.state import NodeId
from rallypoint.control.protocol.codec import MAX_STATE
from rallypoint.control.protocol.errors import RendezvousStateError

NAMES = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.text(), NAMES, NAMES)
def test_no_job_can_reach_into_the_keys_of_another(prefix: str, job: str, other: str) -> None:
    ours, theirs = ElectionKeys.for_job(prefix, job), ElectionKeys.for_job(prefix, other)
    assert (ours == theirs) == (job == other)
    assert job == other or not theirs.state.startswith(ours.root.encode())


def test_ids_that_are_no_text_have_keys_of_their_own() -> None:
    roots = [ElectionKeys.for_job("p", job).root for job in ("a\udcff", "a\udcfe", "a\ud800", "a", "a%FF")]
    assert len(set(roots)) == 5
    assert all(root.isascii() for root in roots)


def test_a_prefix_that_is_no_text_is_a_sentence() -> None:
    with pytest.raises(UserError, match="prefix='a"):
        ElectionKeys.for_job("a\udcff", "job")


def test_a_prefix_may_be_written_in_any_way() -> None:
    assert {ElectionKeys.for_job(each, "j").root for each in ("a/b", "/a/b", "/a/b/", "//a/b//")} == {"/a/b/j/"}
    assert ElectionKeys.for_job("", "j").root == "/j/"


@given(
    st.builds(NodeId, NAMES.map(printable), st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1), NAMES.map(printable))
)
def test_a_node_is_read_as_it_was_written(name: NodeId) -> None:
    assert decode_node(encode_node(name)) == name._replace(addr="")


def test_the_name_of_a_node_may_stand_in_a_log_line_whoever_wrote_it() -> None:
    found = decode_node(encode_node(NodeId("10.0.0.1\n", 1, 0, "\x1b[31mred" + 999 * "x")))
    assert found is not None
    assert found.host.startswith("?[31mredx")
    assert len(found.host) == 255


@given(st.lists(NAMES.map(printable), min_size=1).map(tuple), st.integers(1, 65535), st.integers(0, 2**63 - 1), NAMES)
def test_a_post_is_read_as_it_was_written(addresses: tuple[str, ...], port: int, lease: int, secret: str) -> None:
    post = LeaderRecord(addresses, port, lease, secret)
    assert decode_leader(encode_leader(post)) == post


@given(
    st.text("0123456789abcdef", min_size=1, max_size=32),
    st.integers(0, 2**63 - 1),
    st.binary(max_size=300),
    st.integers(8, 100),
)
def test_what_is_kept_is_read_as_it_was_written(incarnation: str, number: int, state: bytes, part_size: int) -> None:
    keys = ElectionKeys.for_job("/x", "job")._replace(part_size=part_size)
    value, parts = encode_snapshot(keys, incarnation, number, state)
    kept = decode_snapshot(b"key", value)
    assert kept[:3] == (incarnation, number, len(parts))
    assert max(map(len, [kept.packed, *parts])) <= part_size
    stored = [KeyValue(keys.part(number, index), part, 1, 1, 1, 0) for index, part in enumerate(parts)]
    assert state_of(keys, kept, stored) == state
    if stored:
        with pytest.raises(RendezvousStateError, match="damaged"):
            state_of(keys, kept, stored[:-1])


def test_a_state_is_no_larger_when_it_is_unpacked_than_it_may_be() -> None:
    keys = ElectionKeys.for_job("/x", "job")
    snapshot = StoredSnapshot("a", 1, 0, zlib.compress(bytes(MAX_STATE + 1)))
    assert len(snapshot.packed) < 1 << 20
    with pytest.raises(RendezvousStateError, match="too large"):
        state_of(keys, snapshot, ())


@given(st.binary())
def test_bytes_of_others_are_none_of_ours(value: bytes) -> None:
    assert decode_node(value) is None
    assert decode_leader(value) is None
    with pytest.raises(RendezvousStateError, match="did not write"):
        decode_snapshot(b"key", value)


@pytest.mark.parametrize(
    "value",
    [
        b'{"node": 1e999, "pid": 1, "host": "h"}',
        b'{"node": %d, "pid": 1, "host": "h"}' % 2**64,
        b'{"node": 1, "pid": -1, "host": "h"}',
        b'{"node": "abc", "pid": 1, "host": "h"}',
        b'{"addresses": ["h"], "port": 1e999, "lease": 1, "secret": ""}',
        b'{"addresses": ["h"], "port": 1, "lease": %d, "secret": ""}' % 2**64,
        b'{"addresses": [], "port": 1, "lease": 1, "secret": ""}',
        b'{"addresses": "h", "port": 1, "lease": 1, "secret": ""}',
        b'{"host": ' + 100_000 * b"[",
    ],
)
def test_values_that_no_agent_writes_are_none_of_ours(value: bytes) -> None:
    assert decode_node(value) is None
    assert decode_leader(value) is None


def test_a_state_with_a_number_beyond_all_counting_is_none_of_ours() -> None:
    for number in (-1, 2**63, 10**4299):
        with pytest.raises(RendezvousStateError, match="did not write"):
            decode_snapshot(b"key", b"rallypoint-etcd-2 a %d 0 " % number)
        with pytest.raises(RendezvousStateError, match="did not write"):
            decode_snapshot(b"key", b"rallypoint-etcd-2 a 1 %d " % number)
