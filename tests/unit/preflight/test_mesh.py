"""The mesh: dialled nodes, lines about unreachable nodes, encoding."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.clusters.preflight.mesh import (
    FULL_MESH,
    MAX_LINES,
    REMEDY,
    Finding,
    MeshLine,
    decode_finding,
    decode_lines,
    dialled_ranks,
    encode_finding,
    encode_lines,
    is_logged_by,
    mesh_lines,
)

TIMED_OUT, NO_ROUTE = "connection timed out", "no route to host"
Failures = dict[tuple[int, int], str]


def findings(count: int, failures: Failures) -> dict[int, Finding]:
    """Findings of nodes n0, n1, ..., with failed pairs of dialler and dialled."""
    found = {rank: {to: why for (by, to), why in failures.items() if by == rank} for rank in range(count)}
    return {rank: Finding(f"n{rank}", f"10.0.0.{rank}:4000{rank}", failed) for rank, failed in found.items()}


def texts(count: int, failures: Failures) -> list[str]:
    return without_remedy(mesh_lines(findings(count, failures), count))


def without_remedy(lines: list[MeshLine]) -> list[str]:
    return [line.text.removesuffix(f"; {REMEDY}") for line in lines]


def test_up_to_64_nodes_dial_all_others() -> None:
    for count in (1, 2, 3, FULL_MESH):
        for rank in range(count):
            assert dialled_ranks(rank, count) == [other for other in range(count) if other != rank]


@pytest.mark.parametrize("count", [65, 66, 100, 128, 129, 1000, 4096])
def test_more_nodes_dial_some_others(count: int) -> None:
    dials = {rank: set(dialled_ranks(rank, count)) for rank in range(count)}
    assert {len(dialled) for dialled in dials.values()} == {len(dials[0])}
    assert 12 <= len(dials[0]) <= 24
    assert all(rank in dials[other] for rank, others in dials.items() for other in others), "there and back"
    assert all({(rank - 1) % count, (rank + 1) % count} <= others for rank, others in dials.items()), "neighbours"


def test_mesh_lines() -> None:
    (line,) = mesh_lines(findings(4, {(3, 1): NO_ROUTE}), 4)
    assert line == MeshLine(f"n3 cannot reach n1 (10.0.0.1:40001): no route to host; {REMEDY}", "n3", (1, 3))
    both = {rank: Finding("pod", f"10.0.0.{rank}:4000{rank}", {1: NO_ROUTE} if rank == 0 else {}) for rank in range(2)}
    (text,) = without_remedy(mesh_lines(both, 2))
    assert text == "pod (group rank 0) cannot reach pod (group rank 1) (10.0.0.1:40001): no route to host"
    assert texts(64, {(rank, 1): TIMED_OUT for rank in range(64) if rank != 1}) == [
        "63 of 63 nodes cannot reach n1 (10.0.0.1:40001): connection timed out"
    ]
    assert texts(5, {(2, rank): NO_ROUTE for rank in (0, 1, 3)}) == [
        "n2 cannot reach n0 (10.0.0.0:40000), n1 (10.0.0.1:40001) and n3 (10.0.0.3:40003): no route to host"
    ]
    assert texts(64, {(2, rank): NO_ROUTE for rank in range(64) if rank != 2}) == [
        "n2 cannot reach 63 of 63 nodes: no route to host"
    ]
    cut = {(rank, 1): TIMED_OUT for rank in (0, 2, 3)} | {(1, rank): NO_ROUTE for rank in (0, 2, 3)}
    assert texts(4, cut) == [
        "n0, n2 and n3 cannot reach n1 (10.0.0.1:40001): connection timed out",
        "n1 cannot reach n0 (10.0.0.0:40000), n2 (10.0.0.2:40002) and n3 (10.0.0.3:40003): no route to host",
    ]
    dialled = dialled_ranks(2, 200)
    assert texts(200, {(2, rank): NO_ROUTE for rank in dialled}) == [
        f"n2 cannot reach {len(dialled)} of {len(dialled)} nodes: no route to host"
    ]


def test_nodes_without_findings() -> None:
    known = findings(8, {(0, 7): NO_ROUTE})
    del known[7]
    assert without_remedy(mesh_lines(known, 8)) == [
        "the node of group rank 7 did not report in time which nodes it can reach",
        "n0 cannot reach the node of group rank 7: no route to host",
    ]
    (line,) = mesh_lines({0: Finding("n0", "x:1")}, 8)
    assert line.text.endswith("the node of group rank 4 and 3 more did not report in time which nodes they can reach")
    some = findings(3, {})
    del some[1]
    (line,) = mesh_lines(some, 3, {1: "n1"})
    assert line == MeshLine("n1 was started without --preflight; use the same value on all nodes", "n1", (1,))
    (line,) = mesh_lines({0: some[0]}, 3, {1: "n1", 2: "n2"})
    assert line.text == "n1 and n2 were started without --preflight; use the same value on all nodes"


@given(st.integers(2, 80), st.data())
def test_each_pair_is_in_one_line(count: int, data: st.DataObject) -> None:
    pairs = st.integers(0, count - 1).flatmap(
        lambda rank: st.tuples(st.just(rank), st.sampled_from(dialled_ranks(rank, count)))
    )
    failures = data.draw(st.dictionaries(pairs, st.sampled_from([TIMED_OUT, NO_ROUTE]), max_size=60))
    lines = mesh_lines(findings(count, failures), count)
    reported = [{line.ranks[0], other} for line in lines for other in line.ranks[1:]]
    assert sorted(map(sorted, reported)) == sorted(sorted(pair) for pair in failures)
    assert all(len(line.text) < 500 for line in lines)
    assert decode_lines(encode_lines(lines), count) == (len(lines), lines[:MAX_LINES])
    for rank, finding in findings(count, failures).items():
        assert decode_finding(encode_finding(finding), rank, count) == finding


def test_is_logged_by() -> None:
    pair = MeshLine("n3 cannot reach n1", "n1", (1, 3))
    assert [rank for rank in range(6) if is_logged_by(pair, rank)] == [0, 1, 3]
    many = MeshLine("n1 is not reached", "n1", (1, *range(2, 9)))
    assert [rank for rank in range(9) if is_logged_by(many, rank)] == [0, 1]


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\xff", b"{}", b"[1, 2, 3]", b'["n1", "x:1"]', b'["n\\n1", "x:1", []]', b'["n1", "", []]'),
        *(b'["n1", "x:1", [[1, "itself"]]]', b'["n1", "x:1", [[9, "nobody"]]]', b'["n1", "x:1", [[true, "why"]]]'),
        *(b'["n1", "x:1", [[0, 3]]]', b'["n1", "x:1", 7]', b"[" * 100_000, b" " * (300 * 1024)),
        json.dumps(["n1", "x" * 1000, []]).encode(),
    ],
)
def test_invalid_findings(data: bytes) -> None:
    with pytest.raises(ValueError, match="the mesh results of group rank 1 cannot be used"):
        decode_finding(data, 1, 4)


@pytest.mark.parametrize(
    "data",
    [
        *(b"[1, []]]", b"[0, [1]]", b"[-1, []]", b"[1e3, []]", b'[1, [["text", "n", [4]]]]', b'[1, [["text", "n"]]]'),
        *(b'[1, [["", "n", [1]]]]', b'[1, [["te\\u0007xt", "n", [1]]]]', b'[0, [["text", "n", [1]]]]'),
        json.dumps([30, [["text", "n", [1]]] * 30]).encode(),
    ],
)
def test_invalid_lines(data: bytes) -> None:
    with pytest.raises(ValueError, match="the mesh report of group rank 0 cannot be used"):
        decode_lines(data, 4)
