"""Incident bundles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rallypoint.cli.rallyctl import main
from rallypoint.observe.bundle import (
    ON_DEMAND_LIMIT,
    Piece,
    bundle,
    decode_bundle,
    encode_bundle,
    fit,
    incident_lines,
    read_incidents,
    safe_name,
    write_bundle,
    write_index,
)

SUMMARY = {
    "job": "job",
    "round": 2,
    "at": 1e9,
    "why": "a worker failed",
    "headline": "rank 3 failed on node7 (exit code 1): boom",
    "node": {"host": "node7", "pid": 12, "group_rank": 1, "ranks": [2, 3]},
}


def test_fit() -> None:
    pieces = [Piece("a", b"1" * 1000), Piece("log", b"x" * 5000 + b"end"), Piece("dump", b"d" * 900, is_whole=True)]
    fitted = fit(pieces, 4000)
    assert [(piece.name, len(piece.data)) for piece in fitted.pieces] == [("a", 1000), ("log", 3000)]
    assert fitted.pieces[1].data.endswith(b"end")
    assert [text.partition(":")[0] for text in fitted.left_out] == ["log", "dump"]


@pytest.mark.parametrize("limit", [300_000, 1_000_000])
def test_the_limit(limit: int) -> None:
    pieces = [Piece(f"workers/rank_{number}/stderr.txt", b"x" * 100_000) for number in range(40)]
    made = bundle(SUMMARY, pieces, limit)
    assert sum(len(piece.data) for piece in made) <= limit
    fields = json.loads(made[0].data)
    assert len(fields["left_out"]) + len(fields["files"]) >= 40


def test_write_and_read(tmp_path: Path) -> None:
    made = bundle(SUMMARY, [Piece("workers/rank_3/stderr.txt", b"boom\n")], ON_DEMAND_LIMIT)
    first = write_bundle(str(tmp_path / "job" / "round-2"), "node7-12", made)
    second = write_bundle(str(tmp_path / "job" / "round-2"), "node7-12", made)
    assert (Path(first).name, Path(second).name) == ("node7-12", "node7-12.1")
    assert (Path(first) / "workers/rank_3/stderr.txt").read_text() == "boom\n"
    write_index(str(tmp_path / "job" / "round-2"), {"job": "job"})
    write_index(str(tmp_path / "job" / "round-2"), {"job": "job"})
    names = sorted(path.name for path in (tmp_path / "job" / "round-2").iterdir())
    assert names == ["index-2.json", "index.json", "node7-12", "node7-12.1"]
    found = read_incidents([str(tmp_path)])
    assert found.notes == ()
    assert [(incident.round, incident.host, incident.ranks) for incident in found.found] == [(2, "node7", (2, 3))] * 2
    lines = incident_lines(found.found)
    assert lines[0] == "job job, round 2: a worker failed: rank 3 failed on node7 (exit code 1): boom"
    assert lines[1].startswith("    2 nodes in ")


def test_rallyctl_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bundle(str(tmp_path / "job" / "round-2"), "node7-12", bundle(SUMMARY, [], 10_000))
    assert main(["report", str(tmp_path)]) == 0
    assert "round 2: a worker failed: rank 3 failed on node7" in capsys.readouterr().out
    assert main(["report", str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["incidents"]
    assert (row["round"], row["host"], row["ranks"]) == (2, "node7", [2, 3])
    assert main(["report", str(tmp_path / "job"), "--job", "other"]) == 1
    assert "no *.jsonl file was found" in capsys.readouterr().err


def test_a_failed_write_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"."):
        write_bundle(str(tmp_path), "node", [Piece("a", b""), Piece("a", b"")])
    assert list(tmp_path.iterdir()) == []


def test_encoding() -> None:
    made = bundle(SUMMARY, [Piece("stacks.txt", b"stack\n" * 1000)], ON_DEMAND_LIMIT)
    assert decode_bundle(encode_bundle(made)) == made
    for data in (b"", b"x", b"\x78\x9c", encode_bundle([])[:-3] + b"zzz"):
        with pytest.raises(ValueError, match=r"."):
            decode_bundle(data)


@pytest.mark.parametrize(
    "pieces",
    [
        *([Piece(name, b"")] for name in ("../x", "/etc/passwd", "a/../../x", ".hidden")),
        [Piece("a", b""), Piece("a", b"")],
        [Piece("a", b"0" * (3 * ON_DEMAND_LIMIT))],
    ],
)
def test_invalid_bundles(pieces: list[Piece]) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_bundle(encode_bundle(pieces))


def test_unreadable_incidents(tmp_path: Path) -> None:
    for number, text in enumerate(("", "[]", '{"version": 2}', '{"version": 1, "node": 7}')):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "incident.json").write_text(text)
    found = read_incidents([str(tmp_path)])
    assert (found.found, len(found.notes)) == ((), 4)


@pytest.mark.parametrize(("text", "name"), [("job 1/x", "job_1_x"), ("../..", "_.."), ("", "_"), ("ä", "_")])
def test_safe_name(text: str, name: str) -> None:
    assert safe_name(text) == name
