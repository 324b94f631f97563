"""A job's keys in etcd: values are read as written, and foreign bytes are refused."""

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
def test_jobs_have_separate_keys(prefix: str, job: str, other: str) -> None:
    ours, theirs = ElectionKeys.for_job(prefix, job), ElectionKeys.for_job(prefix, other)
    assert (ours == theirs) == (job == other)
    assert job == other or not theirs.state.startswith(ours.root.encode())


def test_odd_prefixes_and_ids() -> None:
    roots = {ElectionKeys.for_job("p", job).root for job in ("a\udcff", "a\udcfe", "a\ud800", "a", "a%FF")}
    assert len(roots) == 5
    assert all(root.isascii() for root in roots)
    assert {ElectionKeys.for_job(prefix, "j").root for prefix in ("a/b", "/a/b", "/a/b/", "//a/b//")} == {"/a/b/j/"}
    assert ElectionKeys.for_job("", "j").root == "/j/"
    with pytest.raises(UserError, match="prefix='a"):
        ElectionKeys.for_job("a\udcff", "job")


@given(
    st.builds(NodeId, NAMES.map(printable), st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1), NAMES.map(printable)),
    st.builds(
        LeaderRecord,
        st.lists(NAMES.map(printable), min_size=1).map(tuple),
        st.integers(1, 65535),
        st.integers(0, 2**63 - 1),
        NAMES,
    ),
)
def test_nodes_and_leaders_are_read_as_written(node: NodeId, leader: LeaderRecord) -> None:
    assert decode_node(encode_node(node)) == node._replace(addr="")
    assert decode_leader(encode_leader(leader)) == leader


def test_node_names_are_cut_and_printable() -> None:
    found = decode_node(encode_node(NodeId("10.0.0.1\n", 1, 0, "\x1b[31mred" + 999 * "x")))
    assert found is not None
    assert found.host.startswith("?[31mredx")
    assert len(found.host) == 255


@given(
    st.text("0123456789abcdef", min_size=1, max_size=32),
    st.integers(0, 2**63 - 1),
    st.binary(max_size=300),
    st.integers(8, 100),
)
def test_snapshots_are_read_as_written(incarnation: str, number: int, state: bytes, part_size: int) -> None:
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


def test_unpacked_states_have_a_limit() -> None:
    keys = ElectionKeys.for_job("/x", "job")
    snapshot = StoredSnapshot("a", 1, 0, zlib.compress(bytes(MAX_STATE + 1)))
    assert len(snapshot.packed) < 1 << 20
    with pytest.raises(RendezvousStateError, match="too large"):
        state_of(keys, snapshot, ())


@given(st.binary())
def test_foreign_bytes_are_not_decoded(value: bytes) -> None:
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
def test_impossible_values_are_not_decoded(value: bytes) -> None:
    assert decode_node(value) is None
    assert decode_leader(value) is None


@pytest.mark.parametrize("number", [-1, 2**63, 10**4299], ids=["negative", "large", "huge"])
def test_impossible_numbers_of_states_are_refused(number: int) -> None:
    for text in (b"rallypoint-etcd-2 a %d 0 ", b"rallypoint-etcd-2 a 1 %d "):
        with pytest.raises(RendezvousStateError, match="did not write"):
            decode_snapshot(b"key", text % number)
