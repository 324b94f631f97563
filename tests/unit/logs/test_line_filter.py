"""Filtered lines, compared with those of the whole text."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rallypoint.workers.logs import tail as tail_module
from rallypoint.workers.logs.tail import LineFilter, Tail
from tests.effort import examples

LETTERS = st.text(alphabet="ab\n\udcff", max_size=30)


@given(writes=st.lists(LETTERS, max_size=12), texts=st.lists(st.text("ab\udcff", max_size=6), min_size=1, max_size=3))
@example(writes=["xxxxxxab", "bxxxxxxxxxx", "\nabb"], texts=["abb"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(200))
def test_filtered_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: list[str], texts: list[str]) -> None:
    space = bytearray(7)  # lines are longer than one read
    monkeypatch.setattr(tail_module, "_FILTER_CHUNK", 5)
    path, kept = tmp_path / "log", tmp_path / "kept"
    path.write_bytes(b"")
    line_filter = LineFilter(str(kept), texts)
    followed = Tail(str(path), b"[p]:", line_filter)
    with path.open("ab", buffering=0) as file:
        for text in writes:
            file.write(text.encode(errors="surrogateescape"))
            list(followed.chunks(0.0, space))
            assert kept.read_bytes() in (b"", kept.read_bytes()[: kept.read_bytes().rfind(b"\n") + 1])
    list(followed.finish(0.0, space))
    followed.close()
    line_filter.close()
    lines = "".join(writes).split("\n")
    passed = [line for line in lines[: None if lines[-1] else -1] if any(text in line for text in texts)]
    expected = "".join(f"[p]:{line}\n" for line in passed).encode(errors="surrogateescape")
    assert kept.read_bytes() == expected


def test_a_truncated_file(tmp_path: Path) -> None:
    path, kept = tmp_path / "log", tmp_path / "kept"
    path.write_bytes(b"half a line")
    line_filter = LineFilter(str(kept), ["a"])
    followed, space = Tail(str(path), b"", line_filter), bytearray(7)
    list(followed.chunks(0.0, space))
    path.write_bytes(b"an\n")
    list(followed.chunks(0.0, space))
    assert kept.read_bytes() == b"an\n"
    followed.close()
    line_filter.close()


def test_a_full_disk(caplog: pytest.LogCaptureFixture) -> None:
    line_filter = LineFilter("/dev/full", ["a"])
    for _ in range(2):
        line_filter.write(b"a\n")
    assert [(record.levelno, "/dev/full" in record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, True)
    ]
    line_filter.close()
